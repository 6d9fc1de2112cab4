"""Checkpoints in other formats: one line each, with a command that works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flowspec.errors import ModelError
from flowspec.model.drafters.sources import open_models
from flowspec.model.weights import formats
from flowspec.model.weights.directory import (
    ModelDirectory,
    check_pair,
    default_pair,
    open_directory,
)
from tests.model.families import FAMILIES

Family = Callable[..., ModelDirectory]


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as raised:
        open_directory(str(path))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def converted(message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelDirectory:
    """What the command in ``message`` writes."""
    monkeypatch.chdir(folder)
    code = message.partition('python -c "')[2].partition('"')[0]
    exec(code, {})
    directory = open_directory(str(folder / "NEW"))
    directory.check_weights()
    return directory


def test_a_type_that_the_library_has_not_is_refused_before_torch_is_imported(
    llama_copy: Path,
) -> None:
    file = llama_copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama9"}))
    with pytest.raises(ModelError, match="has no language model of that type; install a version"):
        open_models(str(llama_copy), "ngram")
    assert {"llama", "qwen3", "gemma3_text"} <= formats.library_types()
    assert formats.library_types() == frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    code = "import sys, flowspec.model.weights.formats as f; f.library_types(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{% for m in messages %}{{ m }", "{{ m['a'] }", "{% if %}"])
def test_a_broken_chat_template_is_refused(tmp_path: Path, place: str, text: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(default_pair()[0], target)
    (target / "chat_template.jinja").unlink()
    if place == "tokenizer_config.json":
        config = json.loads((target / place).read_text())
        (target / place).write_text(json.dumps(config | {"chat_template": text}))
    else:
        (target / place).write_text(text)
    with pytest.raises(ModelError, match=r"chat template in .* is broken, in line 1: ") as refused:
        open_models(str(target), "ngram")
    assert "\n" not in str(refused.value)


def test_a_template_that_is_nested_without_end_is_left_to_whoever_runs_it(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}")
    assert formats.of_template(tmp_path) is None


def test_tags_of_the_library_are_no_fault_of_a_template(tmp_path: Path) -> None:
    text = "{% generation %}{{ x }}{% endgeneration %}{% for a in b %}{% break %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    assert formats.of_template(tmp_path) is None


@pytest.mark.parametrize("wrong", [{"model_type": "bert"}, {"is_encoder_decoder": True}])
def test_a_model_with_an_encoder_is_none_that_continues_a_text(
    llama_copy: Path, wrong: dict[str, object]
) -> None:
    file = llama_copy / "config.json"
    config = json.loads(file.read_text()) | wrong
    file.write_text(json.dumps(config))
    said = f"is a model of type {config['model_type']}, which has an encoder; take a decoder-only"
    assert said in refused(llama_copy)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_a_quantised_checkpoint_names_its_method(llama_copy: Path, method: str) -> None:
    config = json.loads((llama_copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (llama_copy / "config.json").write_text(json.dumps(config))
    message = refused(llama_copy)
    assert f"quantised by {method}" in message
    assert "take the original checkpoint" in message
    assert "--dtype nf4, int4 or int8" in message


def test_experts_in_mxfp4_are_read(llama_copy: Path) -> None:
    config = json.loads((llama_copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (llama_copy / "config.json").write_text(json.dumps(config))
    assert open_directory(str(llama_copy)).layers == 6


def test_of_a_folder_with_a_gguf_file_the_file_is_to_be_given(llama_copy: Path) -> None:
    for file in llama_copy.glob("*.safetensors*"):
        file.unlink()
    weights = llama_copy / "model-q4.gguf"
    weights.write_bytes(b"GGUF")
    assert f"give the file itself: {weights}" in refused(llama_copy)
    (llama_copy / "config.json").unlink()
    assert f"give the file itself: {weights}" in refused(llama_copy)


def test_authors_own_layouts(tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    assert "consolidated.00.pth, weights in their authors' own layout" in refused(tmp_path)


def test_pickled_weights_are_converted_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(default_pair()[1])
    folder = tmp_path / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        weights |= load_file(file)
    torch.save(weights, folder / "pytorch_model.bin")
    message = refused(folder)
    assert "torch's own format" in message
    found = converted(message, tmp_path, monkeypatch)
    check_pair(open_directory(str(source)), found)
    new = load_file(found.path / "model.safetensors")
    assert all(torch.equal(new[name], value) for name, value in weights.items() if name in new)
    assert new.keys() <= weights.keys()


def test_a_language_model_is_taken_out_of_one_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {
        key: value for key, value in FAMILIES["gemma3"].to_dict().items() if key != "model_type"
    }
    vision = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )
    folder = tmp_path / "model"
    whole.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_pair()[1]) / file, folder)
    message = refused(folder)
    assert "is a gemma3 model, a gemma3_text model with other inputs than text" in message
    found = converted(message, tmp_path, monkeypatch)
    assert found.config["model_type"] == "gemma3_text"
    new = load_file(found.path / "model.safetensors")
    layer = whole.model.language_model.layers[3].mlp.up_proj.weight
    assert torch.equal(new["model.layers.3.mlp.up_proj.weight"], layer)
