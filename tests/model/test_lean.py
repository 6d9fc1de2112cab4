"""The short path through plain layers gives the library's bits, or is not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.model.kernels.attention import ExactAttention, exact_attention_for
from flowspec.model.layers import lean
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import place
from flowspec.model.weights.directory import ModelDirectory
from tests.precisions import FOUR_BITS

Family = Callable[..., ModelDirectory]
RUN = RunKey("j", 1)
#: Families with the path, and those that must not have it.
PLAIN = ("llama", "llama3-rope-tied", "qwen2", "qwen3", "mistral")
OTHER = ("gemma2", "phi3", "mixtral", "gpt-oss", "mistral-sliding")


def block_of(directory: ModelDirectory, dtype: str = "float32") -> LayerBlock:
    placing = place(dtype, "cpu", directory.config)
    layers = range(directory.layers)
    return LayerBlock(directory, layers, first=True, last=True, placing=placing)


def passes(block: LayerBlock, path: lean.LeanLayers | None) -> list[torch.Tensor]:
    """Rows of a prompt, of a tree below it, and of another level after a prune."""
    block.lean = path
    cache = block.new_cache(64)
    prompt = tuple(range(7))
    tokens = tuple(5 + at for at in prompt)
    parts = [
        Part(RUN, 0, prompt, tuple(at - 1 for at in prompt), prompt, tokens, prompt, 7),
        Part(RUN, 1, (7, 8, 9, 10), (6, 6, 7, 8), (7, 7, 8, 8), (9, 8, 7, 6), (0, 1, 2, 3)),
        Part(RUN, 2, (11,), (9,), (9,), (5,), (0,), pruned=Pruned((7,), (9,))),
    ]
    found = [block.run(part, None, cache) for part in parts]
    return [*found, block.logits(found[-1])]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FOUR_BITS, "int8"])
def test_both_paths_give_the_same_bits(family: Family, name: str, dtype: str) -> None:
    block = block_of(family(name), dtype)
    path = block.lean
    assert path is not None
    assert block.place_facts()["layers_by"] == "lean"
    for ours, theirs in zip(passes(block, path), passes(block, None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OTHER)
def test_families_with_other_layers_do_not_have_it(family: Family, name: str) -> None:
    block = block_of(family(name))
    assert block.lean is None
    assert block.place_facts()["layers_by"] == "library"


def test_a_path_that_is_not_equal_is_not_taken(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(rows: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        return rows * turn[:, 0]

    monkeypatch.setattr(lean, "turned", wrong)
    assert block_of(family("llama")).lean is None


def test_a_tie_of_the_compiled_attention_costs_no_more_than_that(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact_attention_for(16, torch.float32, torch.device("cpu")) is None:
        pytest.skip("this machine cannot compile it")
    into = ExactAttention.into
    usual = block_of(family("llama")).lean
    assert usual is not None
    assert all(layer._exact is not None for layer in usual._layers)

    def another_way(own: ExactAttention, found: torch.Tensor, *given: Any) -> None:
        into(own, found, *given)
        found.flatten()[0].nextafter_(torch.tensor(torch.inf))

    monkeypatch.setattr(ExactAttention, "into", another_way)
    path = block_of(family("llama")).lean
    assert path is not None
    assert all(layer._exact is None for layer in path._layers)


def test_a_norm_whose_bits_differ_stays_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.variance_epsilon = 1e-5

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * 2

    norm = Norm()
    assert lean.norm_of(norm) is norm


def test_a_user_can_turn_it_off(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lean.VARIABLE, "library")
    assert block_of(family("llama")).lean is None
    monkeypatch.setenv(lean.VARIABLE, "fast")
    with pytest.raises(ConfigError, match="FLOWSPEC_LAYERS is 'fast'; expected lean or library"):
        block_of(family("llama"))


def test_layers_that_are_watched_are_run_by_the_library(family: Family) -> None:
    block = block_of(family("llama"))
    path = block.lean
    plain = passes(block, path)
    seen: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...], named: object) -> None:
        seen.append(tuple(args[0].shape))

    block.body.layers[1].register_forward_pre_hook(note, with_kwargs=True)
    block.body.norm.register_forward_pre_hook(note, with_kwargs=True)
    watched = passes(block, path)
    assert all(torch.equal(*pair) for pair in zip(plain, watched, strict=True))
    hidden = block.config.hidden_size
    assert seen == [(1, count, hidden) for count in (7, 7, 4, 4, 1, 1)]


def test_rows_from_another_stage_take_it_too(family: Family) -> None:
    directory = family("qwen3")
    block = LayerBlock(directory, range(1, 2), first=False, last=False)
    path = block.lean
    assert path is not None
    rows = np.random.default_rng(3).standard_normal((4, block.config.hidden_size))
    ids = (0, 1, 2, 3)
    part = Part(RUN, 0, ids, (-1, 0, 1, 2), ids, (), ids, 4)
    found = []
    for way in (path, None):
        block.lean = way
        found.append(block.run(part, rows.astype(np.float32), block.new_cache(8)))
    assert torch.equal(*found)
