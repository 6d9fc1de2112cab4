"""Layouts of experts in checkpoints, and single experts against the library's module."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowspec.errors import ModelError
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.linear import KernelLinear
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory, open_directory
from tests.model.stages import StageByStage

Family = Callable[..., ModelDirectory]
PROMPT = tuple(range(5, 17))


def logits(directory: ModelDirectory, precision: str = "float32") -> torch.Tensor:
    length = len(PROMPT)
    stages = StageByStage(directory, [range(2), range(2, 6)], length, Placing(precision))
    return stages.feed(range(length), range(-1, length - 1), range(length), PROMPT)


def rewritten(
    directory: ModelDirectory, folder: Path, weights: dict[str, torch.Tensor]
) -> ModelDirectory:
    """The model of ``directory`` with ``weights`` in one file."""
    folder.mkdir()
    shutil.copy(directory.path / "config.json", folder)
    kept = {name: value.contiguous() for name, value in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return open_directory(str(folder))


def state(directory: ModelDirectory) -> dict[str, torch.Tensor]:
    """Weights by the library's names, with all experts of a layer in one tensor."""
    model = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32)
    return dict(model.state_dict())


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_in_one_tensor_are_those_in_many(family: Family, name: str, tmp_path: Path) -> None:
    directory = family(name)
    weights = state(directory)
    assert any(value.ndim == 3 for value in weights.values())
    stacked = rewritten(directory, tmp_path / "stacked", weights)
    assert torch.equal(logits(stacked), logits(directory))


def test_mxfp4_experts_have_the_values_that_the_library_gives_them(
    family: Family, tmp_path: Path
) -> None:
    directory = family("gpt-oss")
    dense, packed = {}, {}
    source = torch.Generator().manual_seed(0)
    for name, value in state(directory).items():
        if value.ndim < 3:
            dense[name] = packed[name] = value
            continue
        count, inputs, outputs = value.shape
        shape = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=source)
        scales = torch.randint(120, 125, shape, dtype=torch.uint8, generator=source)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        dense[name] = convert_moe_packed_tensors(blocks, scales)
    wanted = logits(rewritten(directory, tmp_path / "dense", dense))
    assert torch.equal(logits(rewritten(directory, tmp_path / "packed", packed)), wanted)


def test_an_expert_that_is_missing_or_has_another_shape_is_named(
    family: Family, tmp_path: Path
) -> None:
    directory = family("qwen3-moe")
    weights = state(directory)
    name = "model.layers.0.mlp.experts.down_proj"
    whole = weights.pop(name)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        logits(rewritten(directory, tmp_path / "without", weights))
    weights[name] = whole[:, :-1]
    with pytest.raises(ModelError, match=r"experts\.down_proj has shape \(63, 64\)"):
        logits(rewritten(directory, tmp_path / "other", weights))
    weights[name] = whole[:-1]
    with pytest.raises(ModelError, match=r"experts\.down_proj has shape"):
        logits(rewritten(directory, tmp_path / "fewer", weights))


def test_every_expert_has_kernels_of_its_own_and_counts_as_weights(family: Family) -> None:
    directory = family("mixtral")
    block = LayerBlock(directory, range(1), first=False, last=False)
    linears = [module for module in block.modules() if isinstance(module, KernelLinear)]
    experts = json.loads((directory.path / "config.json").read_text())["num_local_experts"]
    assert len(linears) == 4 + 2 * experts
    assert block.nbytes > 4 * experts * 3 * 64 * 128
    assert not any(parameter.ndim == 3 for parameter in block.parameters())
