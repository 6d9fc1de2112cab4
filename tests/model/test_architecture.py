"""What the library computes once for a whole model, or from a whole text, in stages of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.errors import ModelError
from flowspec.model.layers.architecture import read_config
from flowspec.model.layers.block import LayerBlock
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from tests.model.families import FAMILIES, save
from tests.model.stages import StageByStage

Family = Callable[..., ModelDirectory]


def changed(folder: Path, **fields: object) -> ModelDirectory:
    """The model in ``folder`` with other fields in its config; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return open_directory(str(folder))


def test_longrope_frequencies_do_not_change_with_later_rows(family: Family) -> None:
    """The library takes the long factors for all rows of a pass with a position past 128."""
    block = LayerBlock(family("phi3-longrope"), range(1), first=True, last=False)
    rotary = block.body.rotary_emb
    rows = torch.zeros(1, 2, 64)
    alone = rotary(rows[:, :1], torch.tensor([[100]]))
    beside = rotary(rows, torch.tensor([[100, 200]]))
    assert all(torch.equal(one[:, 0], both[:, 0]) for one, both in zip(alone, beside, strict=True))


def test_texts_end_where_longrope_would_change_its_factors(family: Family) -> None:
    directory = family("phi3-longrope")
    assert directory.context == 128
    rope = directory.config["rope_parameters"]
    older = {**directory.config, "rope_scaling": {**rope, "type": "su"}, "rope_parameters": None}
    del (
        older["rope_scaling"]["rope_type"],
        older["rope_scaling"]["original_max_position_embeddings"],
    )
    assert ModelDirectory(directory.path, older).context == 128
    assert family("llama3-rope-tied").context == 256
    assert family("gemma3").context == 256


@pytest.mark.parametrize(("name", "tied"), [("gemma2", True), ("llama", False)])
def test_a_config_that_leaves_out_whether_weights_are_tied(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """As Gemma's do."""
    directory = changed(save(FAMILIES[name], tmp_path), tie_word_embeddings=None)
    assert "tie_word_embeddings" not in directory.config
    assert directory.tied == tied
    load_stage(directory, range(5, 6))


def test_without_a_head_the_class_decides_whether_the_embedding_takes_its_place(
    tmp_path: Path,
) -> None:
    """As for the library: Llama's default is a head of its own, Gemma's the embedding."""
    folder = save(FAMILIES["llama"], tmp_path / "llama", shard="1GB")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        _ = changed(folder, tie_word_embeddings=None).tied
    gemma = save(FAMILIES["gemma2"], tmp_path / "gemma")
    assert changed(gemma, tie_word_embeddings=None).tied


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("name", "says"), [("llama", True), ("llama", False), ("qwen3", True), ("gemma2", True)]
)
def test_a_head_that_is_there_is_used_whatever_the_config_says(
    tmp_path: Path, name: str, says: bool, stages: int
) -> None:
    """As the library, which computes the expected logits, does."""
    folder = save(FAMILIES[name], tmp_path, shard="1GB")
    if name != "llama":  # whose head is the embedding: it gets one of its own
        head = torch.randn(FAMILIES[name].vocab_size, FAMILIES[name].hidden_size)
        (file,) = folder.glob("*.safetensors")
        save_file({**load_file(file), "lm_head.weight": head}, file, metadata={"format": "pt"})
    directory = changed(folder, tie_word_embeddings=says)
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [5, 9, 2, 7]
    with torch.no_grad():
        expected = library(torch.tensor([ids])).logits[0]
    ranges = layer_ranges(directory.layers, stages)
    found = StageByStage(directory, ranges, len(ids)).feed(range(4), range(-1, 3), range(4), ids)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_layer_keeps_the_kind_that_its_number_gives_it(family: Family) -> None:
    """Layer 1 of 6 has no experts; in a stage of layers 1 and 2 it is the first."""
    block = LayerBlock(family("qwen3-moe"), range(1, 3), first=False, last=False)
    assert [hasattr(layer.mlp, "experts") for layer in block.body.layers] == [False, True]
    assert [layer.self_attn.layer_idx for layer in block.body.layers] == [0, 1]


def test_logits_are_capped(family: Family) -> None:
    block = LayerBlock(family("gemma2"), range(6), first=True, last=True)
    assert block.logits(1000 * torch.ones(1, 64)).abs().max() <= 3


def test_models_that_are_no_decoders_are_refused(tmp_path: Path) -> None:
    folder = save(FAMILIES["gemma3"], tmp_path)
    with pytest.raises(ModelError, match="attends to later tokens"):
        read_config(changed(folder, use_bidirectional_attention=True))
    kinds = ["full_attention"] * 5 + ["linear_attention"]
    with pytest.raises(ModelError, match="linear_attention layers; only attention over KV rows"):
        read_config(changed(folder, use_bidirectional_attention=None, layer_types=kinds))


def test_ids_that_a_model_lacks_are_read_as_another(family: Family) -> None:
    """Models of one tokenizer pad their vocabularies differently, those of a chain too."""
    directory = family("llama")
    block = LayerBlock(directory, range(2), first=True, last=False)
    rows = [
        block.run(
            Part(RunKey("j", 1), 0, (0, 1), (-1, 0), (0, 1), (5, token), (0, 1)),
            None,
            block.new_cache(9),
        )
        for token in (0, directory.vocabulary, directory.vocabulary + 7)
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
