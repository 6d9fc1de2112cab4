"""The short path through plain layers gives the library's bits, or is not taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError, ModelError
from flowspec.model.kernels.attention import ExactAttention, exact_attention_for
from flowspec.model.kernels.layers import CompiledLayers
from flowspec.model.layers import joined, lean, packing
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


def compilable() -> None:
    if exact_attention_for(16, torch.float32, torch.device("cpu")) is None:
        pytest.skip("this machine cannot compile it")


def in_c(block: LayerBlock) -> CompiledLayers:
    assert block.lean is not None
    assert block.lean._compiled is not None
    return block.lean._compiled


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
    in_c = path._compiled is not None
    assert block.place_facts()["layers_by"] == ("compiled" if in_c else "lean")
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
    compilable()
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


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("name", PLAIN)
def test_layers_whose_products_are_in_c_are_run_in_one_call(
    family: Family, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products are several, and where matrices are in several pieces."""
    compilable()
    joined_ones = block_of(family(name), dtype)
    monkeypatch.setattr(joined, "MOST_WEIGHTS", 0)
    monkeypatch.setattr(packing.pack, "__defaults__", (1,))
    separate = block_of(family(name), dtype)
    parts = [layer.linears for layer in in_c(separate)._kept]
    assert min(len(linear.matrices) for linears in parts for linear in linears) > 1
    for block in (joined_ones, separate):
        path = block.lean
        assert in_c(block)
        pairs = zip(passes(block, path), passes(block, None), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_layers_in_c_that_are_not_equal_are_not_taken(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilable()
    run = CompiledLayers._run

    def another_way(own: CompiledLayers, *given: Any) -> torch.Tensor:
        return run(own, *given).mul_(1.01)

    monkeypatch.setattr(CompiledLayers, "_run", another_way)
    block = block_of(family("qwen3"), "int8")
    path = block.lean
    assert path is not None
    assert path._compiled is None
    for ours, theirs in zip(passes(block, path), passes(block, None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("threads", [1, 3])
def test_jobs_in_one_call_have_the_bits_that_they_have_alone(family: Family, threads: int) -> None:
    """Rows in several pieces of a pool."""
    compilable()
    block = block_of(family("qwen2"), "int4")
    assert in_c(block)
    store = block.new_store(12)
    sizes = (17, 40, 3)
    ids = [tuple(range(size)) for size in sizes]
    first = [
        Part(RunKey(str(job), 1), 0, own, tuple(at - 1 for at in own), own, own, own, len(own))
        for job, own in enumerate(ids)
    ]
    second = [
        Part(part.run, 1, (size, size + 1), (size - 1,) * 2, (size,) * 2, (7, 9), (0, 1))
        for part, size in zip(first, sizes, strict=True)
    ]
    before = torch.get_num_threads()
    caches = [store.new_cache() for _ in sizes]
    together = []
    try:
        torch.set_num_threads(threads)
        for parts in (first, second):
            placements = [cache.begin_pass(part) for cache, part in zip(caches, parts, strict=True)]
            together += block.run_together(parts, [None] * 3, caches, placements)
    finally:
        torch.set_num_threads(before)
    alone = []
    own_caches = [block.new_cache(64) for _ in sizes]
    for parts in (first, second):
        alone += [block.run(part, None, own) for part, own in zip(parts, own_caches, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


def test_layers_in_c_refuse_rows_that_are_not_theirs(family: Family) -> None:
    compilable()
    block = block_of(family("llama"), "int8")
    layers = in_c(block)
    hidden = block.config.hidden_size
    cache = block.new_cache(8)
    new, kept = cache.slots(2)
    turn = torch.zeros((2, 2, 1, block._head_dim), dtype=block.dtype)
    rows = torch.zeros((2, hidden), dtype=block.dtype)
    bias = torch.zeros((1, 1, 2, 2), dtype=torch.float64)
    given = [rows, turn, [new], [kept], [bias]]

    def decoded(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        return layers.over(*others)(hidden, range(1), None)

    assert decoded(*given).shape == rows.shape
    other = torch.float32 if block.dtype == torch.bfloat16 else torch.bfloat16
    for at, wrong in (
        (0, rows.to(other)),
        (0, rows[:, 1:]),
        (0, rows[:1]),
        (1, turn.to(other)),
        (3, [[kept[0].to(other)]]),
        (4, [bias.float()]),
        (4, [bias[..., :1]]),
        (4, [bias[:, :, :1]]),
    ):
        with pytest.raises(ModelError):
            decoded(*[*given[:at], wrong, *given[at + 1 :]])


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


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_taps_read_the_rows_that_the_librarys_layers_get(
    family: Family, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[torch.Tensor]] = {}
    for way in ("lean", "library"):
        monkeypatch.setenv(lean.VARIABLE, way)
        block = block_of(family("llama"), dtype)
        path = block.lean
        assert (path is None) == (way == "library")
        plain = passes(block, path)
        rows = read[way] = []
        layers = (1, block.config.num_hidden_layers)
        readers = dict.fromkeys(layers, lambda entering, to=rows: to.append(entering.clone()))
        block.run_together = partial(block.run_together, readers=readers)  # type: ignore[method-assign]
        tapped = passes(block, path)
        assert all(torch.equal(*pair) for pair in zip(plain, tapped, strict=True))
    hidden = block.config.hidden_size
    assert [tuple(rows.shape) for rows in read["lean"]] == [
        (count, hidden) for count in (7, 7, 4, 4, 1, 1)
    ]
    if dtype == "float32":
        assert all(torch.equal(*pair) for pair in zip(*read.values(), strict=True))


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
