"""GGUF files as models: every value and every size as the library itself reads them."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError, ModelError
from flowspec.model.base import placed
from flowspec.model.kernels import kernels_for
from flowspec.model.kernels.integer import Integer
from flowspec.model.layers.architecture import library_model
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.expert_matrices import ExpertMatrices
from flowspec.model.layers.linear import load_linear
from flowspec.model.layers.placing import choose_precision, place
from flowspec.model.shards import ShardPlan, write_shards
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.convert import library_tensors, write_folder
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.weights.gguf_metadata import GGUF_INDEX
from flowspec.model.weights.manifest import AS_STORED
from flowspec.model.weights.precision import KEPT, declared
from flowspec.model.weights.quantise import dequantise
from flowspec.model.weights.same_tokenizer import difference, load_tokenizer
from flowspec.model.weights.stored_weight import StoredWeight
from flowspec.model.weights.tensors import read_rows, read_tensor
from ops.peer import convert
from tests import gguf_files
from tests.gguf_files import EXPERTS, FEED, HEADS, HIDDEN, MIXTURES, SIZE, write
from tests.precisions import SERVED

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", *MIXTURES)
RUN = RunKey("job", 1)
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q4_K", "Q5_K", "Q6_K", "MXFP4"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def values(directory: ModelDirectory, name: str) -> torch.Tensor:
    """The tensor that the library calls ``name``; a mixture's experts are one there."""
    if directory.config["model_type"] == "gpt_oss":
        return library_tensors(directory)[name].read(torch.float32)
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if directory.config["model_type"] == "minimax_m2":
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        name = name.replace(".mlp.", ".block_sparse_moe.")
    prefix, experts, kind = name.partition(".experts.")
    if not experts:
        return read_tensor(name, directory.tensor(name), torch.float32)
    parts = names[kind]
    return torch.stack(
        [
            torch.cat(
                [values_of(directory, f"{prefix}.experts.{at}.{one}.weight") for one in parts]
            )
            for at in range(EXPERTS)
        ]
    )


def values_of(directory: ModelDirectory, name: str) -> torch.Tensor:
    return read_tensor(name, directory.tensor(name), torch.float32)


def library(file: Path, directory: ModelDirectory) -> Any:
    """The model as the library reads the file, with our sizes: it passes some of them over.

    It reads no files of gpt-oss, of which these are the tensors in its layout; and none of Mistral,
    which is a Llama here.
    """
    config = AutoConfig.from_pretrained(directory.path)
    if config.model_type == "mistral":
        config = LlamaConfig(**{**config.to_dict(), "model_type": "llama"})
    if config.model_type == "gpt_oss":
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        made.load_state_dict(gpt_oss_tensors(file))
        return made.eval()
    given = {"gguf_file": file.name, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(str(file.parent), config=config, **given)


def gpt_oss_tensors(file: Path) -> dict[str, torch.Tensor]:
    """What is in a file of gpt-oss, by the names and in the layout that the library has."""
    stored = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in GGUFReader(file).tensors
    }
    found = {
        "model.embed_tokens.weight": stored["token_embd.weight"],
        "model.norm.weight": stored["output_norm.weight"],
        "lm_head.weight": stored["output.weight"],
    }
    for at in range(gguf_files.LAYERS):
        of = {
            name.removeprefix(f"blk.{at}."): value
            for name, value in stored.items()
            if name.startswith(f"blk.{at}.")
        }
        layer = {
            "input_layernorm.weight": of["attn_norm.weight"],
            "post_attention_layernorm.weight": of["post_attention_norm.weight"],
            "self_attn.sinks": of["attn_sinks.weight"],
        }
        for leaf in ("weight", "bias"):
            for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
                layer[f"self_attn.{ours}_proj.{leaf}"] = of[f"attn_{theirs}.{leaf}"]
            layer[f"mlp.router.{leaf}"] = of[f"ffn_gate_inp.{leaf}"]
        gates, ups, downs = (of[f"ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        both = torch.empty((EXPERTS, HIDDEN, 2 * FEED))
        both[..., ::2], both[..., 1::2] = gates.mT, ups.mT
        biases = torch.empty((EXPERTS, 2 * FEED))
        biases[..., ::2], biases[..., 1::2] = of["ffn_gate_exps.bias"], of["ffn_up_exps.bias"]
        experts = {
            "gate_up_proj": both,
            "gate_up_proj_bias": biases,
            "down_proj": downs.mT.contiguous(),
            "down_proj_bias": of["ffn_down_exps.bias"],
        }
        layer |= {f"mlp.experts.{name}": value for name, value in experts.items()}
        found |= {f"model.layers.{at}.{name}": value for name, value in layer.items()}
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_librarys_values_and_config(tmp_path: Path, family: str) -> None:
    file = tmp_path / "model.gguf"
    write(file, family)
    directory = open_directory(str(file))
    for name, expected in library(file, directory).state_dict().items():
        if name != "lm_head.weight" or not directory.tied:
            assert torch.equal(values(directory, name), expected), name
    if family == "gpt-oss":  # the library cannot read its metadata
        rope = directory.config["rope_parameters"]
        assert (rope["rope_type"], rope["factor"], rope["truncate"]) == ("yarn", 32.0, False)
        assert rope["original_max_position_embeddings"] == 16
        assert directory.config["sliding_window"] == 16
        assert directory.config["num_local_experts"] == EXPERTS
        return
    read = AutoConfig.from_pretrained(str(tmp_path), gguf_file=file.name)
    known = json.loads(read.to_json_string(use_diff=False))
    sizes = {"head_dim", "sliding_window", "moe_intermediate_size"}
    differing = {key for key in known if directory.config.get(key) != known[key]}
    assert differing <= sizes | {"shared_expert_intermediate_size", "dtype", "architectures"} | {
        key for key in known if key.startswith("_") or key == "transformers_version"
    }
    if family == "mistral":  # the library's default is not in the file
        assert directory.config["sliding_window"] is None
    assert directory.config.get("head_dim", SIZE) == SIZE
    assert directory.config["dtype"] == "float32"
    assert directory.tied == family.startswith("gemma")


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_has_the_librarys_values(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind=kind, tied=True)
    directory = open_directory(str(file))
    for name, expected in library(file, directory).state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(values(directory, name), expected), name
    assert directory.tied
    wanted = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert directory.config["dtype"] == wanted
    wanted = choose_precision("auto", "cpu", {"dtype": wanted})
    assert directory.config["gguf_types"] == {kind: 1 + 7 * gguf_files.LAYERS}
    own = "int4" if kind.startswith("Q4") else "int8-block"
    chosen = own if kind not in ("F32", "F16", "BF16") and own in SERVED else wanted
    assert choose_precision("auto", "cpu", directory.config) == chosen


def test_a_file_of_several_types_has_the_librarys_values(tmp_path: Path) -> None:
    """As Q4_K_M has them."""
    file = tmp_path / "model.gguf"
    write(file, kind="Q4_K", kinds={"ffn_down": "Q6_K", "attn_v": "Q6_K", "output": "Q8_0"})
    directory = open_directory(str(file))
    for name, expected in library(file, directory).state_dict().items():
        assert torch.equal(values(directory, name), expected), name
    assert directory.config["gguf_types"] == {"Q4_K": 11, "Q6_K": 4, "Q8_0": 1}


def test_a_files_chat_template_renders_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    template = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
    write(file, more={"tokenizer.chat_template": template})
    tokenizer = Tokenizer(open_directory(str(file)))
    assert tokenizer.encode("he", raw=False) == tokenizer.encode("<s>he</s>", raw=True)


def block_of(directory: ModelDirectory, layers: range, precision: str) -> LayerBlock:
    ends = {"first": not layers.start, "last": layers.stop == gguf_files.LAYERS}
    return LayerBlock(directory, layers, **ends, placing=place(precision, "cpu", directory.config))


def first_rows(directory: ModelDirectory) -> torch.Tensor:
    """Three rows behind the first layer in int4."""
    block = block_of(directory, range(1), "int4")
    part = Part(RUN, 0, (0, 1, 2), (-1, 0, 1), (0, 1, 2), (5, 6, 7), (0, 1, 2), 3)
    return block.run(part, None, block.new_cache(3))


IDS = tuple(range(3, 20))


def logits_by(stages: Sequence[ModelDirectory], precision: str) -> torch.Tensor:
    """Logits after each of ``IDS`` by stages of one layer, each with the folder of its weights."""
    rows = tuple(range(len(IDS)))
    part = Part(RUN, 0, rows, tuple(row - 1 for row in rows), rows, IDS, rows, len(IDS))
    hidden = None
    for layer, directory in enumerate(stages):
        block = block_of(directory, range(layer, layer + 1), precision)
        hidden = block.run(part, hidden, block.new_cache(len(IDS))).float().numpy()
    return block.logits(torch.from_numpy(hidden).to(block.dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_over_a_files_layers_is_the_librarys(tmp_path: Path, family: str) -> None:
    """Over two blocks, of which each reads its own layer."""
    file = tmp_path / "model.gguf"
    write(file, family, "Q8_0")
    directory = open_directory(str(file))
    found = logits_by([directory] * gguf_files.LAYERS, "float32")
    with torch.inference_mode():
        wanted = library(file, directory)(input_ids=torch.tensor([IDS])).logits[0]
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("kind", "precision", "how"),
    [
        ("Q4_1", "int4", "codes kept" if Integer(4).missing() else "kept"),
        ("Q4_K", "int4", "codes kept"),
        ("Q4_1", "bfloat16", "rounded"),
        ("Q4_1", "float32", "kept"),
        ("Q6_K", "int8", "rounded"),
        ("BF16", "bfloat16", "kept"),
        ("BF16", "float16", "rounded"),
    ],
)
def test_a_stage_says_whether_it_keeps_a_files_codes(
    tmp_path: Path, kind: str, precision: str, how: str
) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind=kind)
    block = block_of(open_directory(str(file)), range(1), precision)
    said = placed(block.place_facts())
    assert said is not None and said.startswith(f"{precision} {how} from {kind} on cpu by ")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_in_four_bits_are_kept(tmp_path: Path, kind: str) -> None:
    """Of Q4_K the scales and minima are products, and rounded to float16."""
    file = tmp_path / "model.gguf"
    write(file, kind=kind)
    directory = open_directory(str(file))
    for name in ("mlp.up_proj", "self_attn.q_proj", "mlp.down_proj"):
        stored = StoredWeight(directory, f"model.layers.0.{name}.weight")
        part = range(3, stored.shape[0] - 2)
        exact = values_of(directory, f"model.layers.0.{name}.weight")[3:-2]
        weight = stored.read(part, "int4")
        kept = dequantise(weight, torch.float32)
        assert weight.from_zero
        if kind == "Q4_K":
            most = exact.view(-1, 32).abs().amax(-1, keepdim=True)
            assert ((kept - exact).view(-1, 32).abs() <= most * 2**-9).all()
        else:
            assert torch.equal(kept, exact)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_all_kernels_multiply_by_the_values_of_a_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind=kind)
    directory = open_directory(str(file))
    stored = StoredWeight(directory, "model.layers.0.mlp.up_proj.weight")
    values = values_of(directory, "model.layers.0.mlp.up_proj.weight").double().t()
    rows = torch.randn((5, stored.shape[1]), generator=torch.Generator().manual_seed(1))
    exact = rows.double() @ values
    tried = 0
    for kernel in kernels_for("int4", "cpu"):
        if kernel.takes(*stored.shape):
            whole = stored.read(range(stored.shape[0]), "int4")
            found = kernel.pack(whole, torch.float32, torch.device("cpu")).multiply(rows)
            assert (found - exact).norm() <= 1e-4 * exact.norm(), kernel.name
            tried += 1
    assert tried
    linear = load_linear(stored, "int4", torch.float32, torch.device("cpu"))
    assert (linear(rows) - exact).norm() <= 1e-4 * exact.norm()


def test_a_file_is_described_once_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.gguf"
    write(file)
    said = []
    for _ in range(2):
        assert open_directory(str(file)).source == file
        said.append(capsys.readouterr().err)
    assert said[0].startswith("note: reading config and tokenizer of some.gguf into ")
    assert said[1] == ""


def test_a_shard_has_the_codes_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind="Q4_1")
    directory = open_directory(str(file))
    write_shards(directory, ShardPlan((range(1), range(1, 2)), "int4"), tmp_path / "parts")
    name = "model.layers.0.self_attn.k_proj.weight"
    shard = open_directory(str(tmp_path / "parts/stage-1"))
    weight = StoredWeight(shard, name).read(range(5, 60), "int4")
    exact = values_of(directory, name)[5:60]
    assert torch.equal(dequantise(weight, torch.float32), exact)


def test_experts_in_four_bits_are_kept_by_stages_and_shards(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, "qwen3moe", "Q4_1")
    directory = open_directory(str(file))
    write_shards(directory, ShardPlan((range(1), range(1, 2)), "int4"), tmp_path / "parts")
    shard = open_directory(str(tmp_path / "parts/stage-1"))
    prefix = "model.layers.0.mlp.experts"
    parts = [values_of(directory, f"{prefix}.2.{part}_proj.weight") for part in ("gate", "up")]
    exact = torch.cat(parts)
    for held in (directory, shard):
        experts = ExpertMatrices(
            held, prefix, 0, (exact.shape[0], exact.shape[1]), transposed=False
        )
        weight = experts.of(2).read(range(3, len(exact)), "int4")
        assert torch.equal(dequantise(weight, torch.float32), exact[3:])
    assert torch.equal(*(first_rows(held) for held in (directory, shard)))


def test_an_expert_that_comes_out_even_beside_another_alone_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "FEED", 48)  # two of 48 outputs are in four bits, one in eight
    file = tmp_path / "model.gguf"
    write(file, "qwen3moe")
    directory = open_directory(str(file))
    write_shards(directory, ShardPlan((range(1), range(1, 2)), "int4"), tmp_path / "parts")
    shard = open_directory(str(tmp_path / "parts/stage-1"))
    prefix = "model.layers.0.mlp.experts.2."
    found = {name.removeprefix(prefix) for name in shard.weight_files if name.startswith(prefix)}
    assert found == {
        *("gate_proj.weight", "up_proj.weight"),
        *("down_proj.weight.codes", "down_proj.weight.scales"),
    }
    assert torch.equal(*(first_rows(held) for held in (directory, shard)))


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_shard_without_its_files_codes_is_refused_in_int4(tmp_path: Path, dtype: str) -> None:
    """Its values would be others than those of a stage that reads the file."""
    file = tmp_path / "model.gguf"
    write(file, kind="Q4_1")
    directory = open_directory(str(file))
    if dtype == "int4":  # as they were cut when scales were rounded
        cast(dict[str, Any], directory.config).pop(KEPT)
    write_shards(directory, ShardPlan((range(1), range(1, 2)), dtype), tmp_path / "parts")
    shard = open_directory(str(tmp_path / "parts/stage-1"))
    assert shard.config[KEPT] == "int4"
    stored = StoredWeight(shard, "model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(ModelError, match="cut it again with --dtype int4"):
        stored.read(range(64), "int4")


def test_blocks_in_eight_bits_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind="Q8_0")
    directory = open_directory(str(file))
    for name in ("mlp.up_proj", "self_attn.q_proj", "mlp.down_proj"):
        stored = StoredWeight(directory, f"model.layers.0.{name}.weight")
        kept = stored.read(range(stored.shape[0]), "int8-block")
        exact = values_of(directory, f"model.layers.0.{name}.weight")
        assert torch.equal(dequantise(kept, torch.float32), exact)


@pytest.mark.parametrize("rows", [range(1), range(3, 130), range(127, 128), range(64, 256)])
def test_any_rows_of_interleaved_heads_are_those_of_the_whole(tmp_path: Path, rows: range) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind="Q8_0")
    directory = open_directory(str(file))
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = values_of(directory, name)
    assert whole.shape[0] == HEADS * SIZE
    part = torch.cat(list(read_rows(name, directory.tensor(name), rows)))
    assert torch.equal(part, whole[rows.start : rows.stop])


def test_the_packaged_target_comes_back_from_a_file(tmp_path: Path) -> None:
    original = open_directory(default_pair()[0])
    file = tmp_path / "target.gguf"
    convert.convert(original, file)
    directory = open_directory(str(file))
    assert directory.weight_files.keys() == original.weight_files.keys()
    for name in original.weight_files:
        assert torch.equal(values_of(directory, name), values_of(original, name)), name
    assert difference(directory.path, original.path) == ""
    assert directory.eos == original.eos
    assert directory.context == original.context


def test_split_files_are_one_model_named_by_any_of_them(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    write(tmp_path / "part.gguf", parts=3)
    whole = open_directory(str(tmp_path / "whole.gguf"))
    for part in (1, 3):
        found = open_directory(str(tmp_path / f"part-{part:05}-of-00003.gguf"))
        assert found.weight_files.keys() == whole.weight_files.keys()
        assert len(set(found.weight_files.values())) == 3
        for name in whole.weight_files:
            assert torch.equal(values_of(found, name), values_of(whole, name)), name
    (tmp_path / "part-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"part-00002-of-00003\.gguf is not beside it"):
        open_directory(str(tmp_path / "part-00001-of-00003.gguf"))


def test_a_tokenizer_of_pieces_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, pieces=True)
    directory = open_directory(str(file))
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("hello 世 hello", raw=False)
    read = load_tokenizer(directory.path)
    assert [*ids[:2], ids[-1]] == read.convert_tokens_to_ids(["<s>", "▁hello", "▁hello"])
    assert len(ids) == 2 + 1 + len("世".encode()) + 1
    assert tokenizer.detokenizer.decode(ids) == "hello 世 hello"
    assert tokenizer.eos == {2}


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "gemma3"])
def test_a_text_of_pieces_begins_without_a_space_if_the_file_says_so(
    tmp_path: Path, family: str
) -> None:
    """As llama.cpp's converter says it of tokenizers that add none."""
    file = tmp_path / "model.gguf"
    write(file, family, pieces=True, more={"tokenizer.ggml.add_space_prefix": False})
    directory = open_directory(str(file))
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("hello hello", raw=False)
    read = load_tokenizer(directory.path)
    assert [*ids] == read.convert_tokens_to_ids(["<s>", "hello", "▁hello"])
    assert tokenizer.detokenizer.decode(ids) == "hello hello"
    assert tokenizer.detokenizer.decode(tokenizer.encode(" hello", raw=False)) == " hello"


def test_a_tokenizer_of_pieces_is_refused_where_the_library_has_none(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, "qwen2", pieces=True)
    assert "its tokenizer is one of SentencePiece, which no qwen2 model has" in refused(file)


def test_a_split_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, more={"tokenizer.ggml.pre": "viking"})
    assert "splits texts as 'viking' does" in refused(file)


def test_smollm_splits_at_every_digit_before_it_splits_at_spaces(tmp_path: Path) -> None:
    """As llama.cpp does, and the model's own tokenizer: the spaces before a digit stay together."""
    file = tmp_path / "model.gguf"
    write(file, more={"tokenizer.ggml.pre": "smollm"})
    split = load_tokenizer(open_directory(str(file)).path).backend_tokenizer.pre_tokenizer
    found = [piece for piece, _ in split.pre_tokenize_str("a\n    15 b")]
    assert found == ["a", "ĊĠĠĠĠ", "1", "5", "Ġb"]


def test_ends_are_all_that_the_file_names(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, more={"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 7})
    assert open_directory(str(file)).eos == {1, 2, 7}


def test_a_file_is_described_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file)
    first = open_directory(str(file)).path
    assert open_directory(str(file)).path == first
    write(file, kind="Q8_0")
    assert open_directory(str(file)).path != first
    assert len(list((cache / "flowspec" / "gguf").iterdir())) == 2


# ---- scaled rotary embeddings --------------------------------------------------------------------


def llama_3(factor: float) -> np.ndarray[Any, Any]:
    """Factors of the frequencies as llama.cpp's converter computes them."""
    found = []
    for at in range(0, SIZE, 2):
        length = 2 * math.pi * 10_000.0 ** (at / SIZE)
        if length < 8192 / 4:
            found.append(1.0)
        elif length > 8192:
            found.append(factor)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_frequencies_are_told_from_their_factors(tmp_path: Path, factor: float) -> None:
    file = tmp_path / "model.gguf"
    write(file, extra={"rope_freqs.weight": llama_3(factor)})
    rope = open_directory(str(file)).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    assert rope["original_max_position_embeddings"] == 8192


def test_frequencies_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, extra={"rope_freqs.weight": np.linspace(1, 5, SIZE // 2, dtype=np.float32)})
    with pytest.raises(ModelError, match="rope_freqs are not Llama 3's"):
        open_directory(str(file))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_in_the_metadata_is_used(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    more = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    write(file, more=more)
    rope = open_directory(str(file)).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
    assert rope["original_max_position_embeddings"] == 128


def test_phi3s_long_and_short_factors_are_used(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    factors = np.linspace(1, 2, SIZE // 2, dtype=np.float32)
    extra = {"rope_factors_long.weight": 2 * factors, "rope_factors_short.weight": factors}
    write(file, "phi3", extra=extra, more={"phi3.rope.scaling.original_context_length": 256})
    directory = open_directory(str(file))
    rope = directory.config["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["long_factor"] == (2 * factors).tolist()
    assert directory.context == 256


# ---- what else reads them ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3moe", "gemma3", "phi3", "gpt-oss", "minimax-m2"])
def test_the_library_reads_what_was_converted(tmp_path: Path, family: str) -> None:
    file = tmp_path / "model.gguf"
    write(file, family, "Q8_0")
    directory = open_directory(str(file))
    write_folder(directory, tmp_path / "made", "float32")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ours = library_model(directory, torch.float32)
    for name, expected in library(file, directory).state_dict().items():
        assert torch.equal(made.state_dict()[name], expected), name
        assert torch.equal(ours.state_dict()[name], expected), name
    assert difference(directory.path, tmp_path / "made") == ""
    said = open_directory(str(tmp_path / "made")).config
    assert (said["dtype"], said["architectures"]) == ("float32", [type(made).__name__])
    assert declared(said) == "float32"
    with pytest.raises(ConfigError, match="exists already"):
        write_folder(directory, tmp_path / "made", "float32")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match=r"takes 0\.0 GB and its disk has 0\.0 GB left"),
    ):
        patch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))
        write_folder(directory, tmp_path / "more", "float32")
    with pytest.raises(ConfigError, match="only a GGUF file is converted"):
        write_folder(open_directory(str(tmp_path / "made")), tmp_path / "again", "float32")


def test_a_shard_of_a_file_gives_the_files_bits(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind="Q4_K")
    directory = open_directory(str(file))
    plan = ShardPlan([range(1), range(1, 2)], "int8", True)
    write_shards(directory, plan, tmp_path / "parts")
    part = open_directory(str(tmp_path / "parts" / "stage-2"))
    for name in part.weight_files:
        if name in directory.weight_files:
            assert torch.equal(values_of(part, name), values_of(directory, name)), name
    matrix = "model.layers.1.self_attn.k_proj.weight"
    rows = range(64)
    stored, read = (StoredWeight(one, matrix).read(rows, "int8") for one in (part, directory))
    assert all(map(torch.equal, stored.tensors, read.tensors))
    with pytest.raises(ModelError, match="name the precision of the shards with --dtype"):
        write_shards(directory, replace(plan, dtype=AS_STORED), tmp_path / "stored")


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_shards_compute_what_stages_of_the_file_do(tmp_path: Path, family: str) -> None:
    file = tmp_path / "model.gguf"
    write(file, family, "Q8_0")
    directory = open_directory(str(file))
    blocks = [range(layer, layer + 1) for layer in range(gguf_files.LAYERS)]
    write_shards(directory, ShardPlan(blocks, "int8"), tmp_path / "parts")
    shards = [
        open_directory(str(tmp_path / f"parts/stage-{stage}"))
        for stage in range(1, gguf_files.LAYERS + 1)
    ]
    assert torch.equal(logits_by(shards, "int8"), logits_by([directory] * len(blocks), "int8"))


@pytest.mark.parametrize("part", ["gate", "down"])
def test_an_experts_bias_of_another_size_is_named(tmp_path: Path, part: str) -> None:
    rows = FEED if part == "gate" else HIDDEN
    longer = np.zeros((EXPERTS, rows + 1), np.float32)
    file = tmp_path / "model.gguf"
    write(file, "gpt-oss", extra={f"blk.0.ffn_{part}_exps.bias": longer})
    with pytest.raises(ModelError, match=rf"{part}_proj\.bias has shape \({rows + 1},\)"):
        block_of(open_directory(str(file)), range(1), "float32")


# ---- what is refused -----------------------------------------------------------------------------


def refused(file: Path) -> str:
    with pytest.raises(ModelError) as raised:
        open_directory(str(file))
    said = str(raised.value)
    assert "\n" not in said and len(said) < 400
    assert str(file) in said
    return said


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file)
    data = file.read_bytes()
    for cut in (0, 3, 12, 400, 60_000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        assert "download it again" in refused(file)
    file.write_bytes(b"none" + data[4:])
    assert "download it again" in refused(file)


def test_a_file_that_is_cut_after_it_was_opened_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file)
    folder = open_directory(str(file)).path
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="cut short"):
        open_directory(str(folder)).tensor("model.norm.weight")
    assert (folder / GGUF_INDEX).is_file()


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("falcon", {}, "holds 'falcon' architecture"),
        ("llama", {"llama.expert_count": 8}, "a mixture of llama's"),
        ("llama", {"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0}, "'odd'"),
    ],
)
def test_what_is_not_read_is_named(
    tmp_path: Path, family: str, more: dict[str, Any], says: str
) -> None:
    file = tmp_path / "model.gguf"
    write(file, family, more=more)
    assert says in refused(file)


def test_a_type_or_a_tensor_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, kind="Q4_0", extra={"blk.0.odd.weight": np.zeros(4, np.float32)})
    assert "tensor blk.0.odd.weight" in refused(file)
    write(file, kind="Q4_0", kinds={"ffn_down": "Q2_K"})
    assert "tensor blk.0.ffn_down.weight has type Q2_K; of GGUF files F32, " in refused(file)


def test_a_user_without_home_is_told_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", none)
    write(tmp_path / "model.gguf")
    assert "the user has no home folder; set XDG_CACHE_HOME" in refused(tmp_path / "model.gguf")


def test_a_cache_on_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tokenizer: object, folder: Path) -> None:
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    write(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"written: .*No space left.*; free some room, or set XDG"):
        open_directory(str(tmp_path / "model.gguf"))


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        open_directory(str(tmp_path / "model.gguf"))


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read every file, so the reader refuses."""
    file = tmp_path / "model.gguf"
    write(file)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("gguf.GGUFReader", refuse)
    said = refused(file)
    assert said.startswith(f"{file} cannot be used: Permission denied; ")
