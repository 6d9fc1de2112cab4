"""Block drafters against the published pass, and the texts they draft against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import BlockDone, BlockDraft, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling, perturbed
from flowspec.errors import ConfigError, ModelError, StateError
from flowspec.model.drafters.block_drafter import BlockDrafter, load_block_drafter
from flowspec.model.drafters.block_layout import spread_layers
from flowspec.model.drafters.sources import (
    check_sources,
    load_sources,
    open_models,
    taps_of,
    target_needs,
)
from flowspec.model.reference import Reference
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from flowspec.proof.depth import acceptance_by_depth
from flowspec.proof.plain import PlainText
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.simulate import profile_costs, simulate, simulate_stages
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import EXACT
from tests.marks import crossed
from tests.model.block_drafters import BLOCK, MASK, Published, save_block_drafter

Family = Callable[..., ModelDirectory]
RUN = RunKey("j", 1)
VOCABULARY = 120
#: The published layouts: levels of a block, and whether a row proposes for its own position.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash with biases": {"bias": True},
    "deepspec": {"deepspec": True},
}


class Bench:
    """A drafter fed by hand for a text, and the published pass over the same weights."""

    def __init__(self, folder: Path, target: ModelDirectory, **layout: Any) -> None:
        directory = save_block_drafter(folder, **layout)
        self.drafter = load_block_drafter(directory, target)
        self.published = Published(directory, target)
        self.deepspec = bool(layout.get("deepspec"))

    def open(self, text: Sequence[int], sampling: Sampling = Sampling()) -> torch.Tensor:
        """Allocate, and learn all rows of ``text``; what was learnt."""
        self.drafter.allocate(RUN, 1200, sampling, Returns(hidden=True))
        sums = self.published.sums(text)
        self.drafter.learn(RUN, range(len(text)), sums.numpy())
        return sums

    def logits(self, sums: torch.Tensor, known: Sequence[int]) -> torch.Tensor:
        """The published logits by level, ``[levels, vocabulary]``."""
        levels = self.drafter.levels
        masks = levels - self.deepspec
        rows = self.published.rows(sums, [*known, *[MASK] * masks])
        return rows[-levels:] @ self.published.lm_head.T

    def run(self, text: Sequence[int], context: range, paths: Sequence[Sequence[int]]) -> BlockDone:
        """A pass over ``context`` rows of ``text``, and a block below each of ``paths``."""
        ids, parents, positions, tokens = [], [], [], []
        answers = []
        for path in paths:
            for at, token in enumerate(path):
                parents.append(ids[-1] if at else len(text) - 1)
                ids.append(1000 + len(ids))
                positions.append(len(text) + at)
                tokens.append(token)
            answers.append(len(context) + len(ids) - 1)
        part = Part(
            run=RUN,
            segment=-1,
            ids=(*context, *ids),
            parents=(*(at - 1 for at in context), *parents),
            positions=(*context, *positions),
            tokens=(*(text[at] for at in context), *tokens),
            offsets=(),
            context=len(context),
            answers=tuple(answers),
        )
        return self.drafter.run(BlockDraft(part, VOCABULARY, levels=self.drafter.levels))


def by_level(done: BlockDone, block: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    first = (done.tokens[block], done.values[block])
    return [first, *((level.tokens, level.values) for level in done.below[block])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family_name", ["llama", "qwen3"])
def test_a_pass_is_the_published_one(
    family: Family, tmp_path: Path, layout: str, family_name: str
) -> None:
    """Context in two passes, several blocks in one, with tokens in flight."""
    bench = Bench(tmp_path / "drafter", family(family_name), **LAYOUTS[layout])
    assert bench.drafter.levels == BLOCK - (not LAYOUTS[layout].get("deepspec"))
    text = np.random.default_rng(3).integers(VOCABULARY, size=23).tolist()
    sums = bench.open(text)
    bench.run(text, range(15), [])
    paths = [[31], [31, 4, 99, 12, 5, 60, 71], [8, 8]]
    done = bench.run(text, range(15, 23), paths)
    assert len(done.tokens) == len(done.below) == len(paths)
    for number, path in enumerate(paths):
        wanted = bench.logits(sums, path).log_softmax(-1)
        for level, (tokens, values) in enumerate(by_level(done, number)):
            assert len(set(tokens)) == VOCABULARY
            assert (wanted[level][list(tokens)] - torch.tensor(values)).abs().max() < 2e-4
            assert list(values) == sorted(values, reverse=True)


def test_many_blocks_equal_single_ones(family: Family, tmp_path: Path) -> None:
    """A pass of more rows than are computed at once; each block depends on its path alone."""
    bench = Bench(tmp_path / "drafter", family("llama"))
    text = list(range(20, 40))
    bench.open(text)
    bench.run(text, range(20), [])
    drawn = np.random.default_rng(4)
    sizes = [1, 60, 3, 200, 150, 2, 90, 130, 1]
    paths = [drawn.integers(VOCABULARY, size=size).tolist() for size in sizes]
    together = bench.run(text, range(0), paths)
    for number, path in enumerate(paths):
        alone = bench.run(text, range(0), [path])
        for one, other in zip(by_level(alone, 0), by_level(together, number), strict=True):
            assert np.allclose(sorted(one[1]), sorted(other[1]), atol=2e-4)
            assert one[0][0] == other[0][0]


def test_a_coupled_pass_sees_the_noise_of_each_position(family: Family, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "drafter", family("llama"))
    text = list(range(30, 42))
    sampling = Sampling(0.8, seed=11)
    sums = bench.open(text, sampling)
    bench.run(text, range(12), [])
    path = [50, 51, 52]
    ids = (100, 101, 102)
    part = Part(RUN, -1, ids, (11, *ids[:2]), (12, 13, 14), tuple(path), (), answers=(2,))
    done = bench.drafter.run(BlockDraft(part, 5, coupled=True, levels=bench.drafter.levels))
    logits = bench.logits(sums, path).numpy()
    for level, (tokens, values) in enumerate(by_level(done, 0)):
        wanted, gaps = perturbed(logits[level], sampling, 15 + level, 5)
        assert tokens == wanted
        assert np.allclose(values, gaps, atol=1e-3)


def test_what_is_remembered_is_what_later_passes_need(family: Family, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "drafter", family("llama"))
    text = list(range(40, 52))
    bench.open(text)
    bench.run(text, range(8), [])
    state = bench.drafter._runs[RUN]
    assert sorted(state.learnt) == [8, 9, 10, 11]
    bench.drafter.learn(RUN, [3], np.zeros((1, 64), np.float32))
    assert 3 not in state.learnt
    with pytest.raises(StateError, match="rows of shape"):
        bench.drafter.learn(RUN, [9, 10], np.zeros((1, 64), np.float32))
    bench.run(text, range(8, 12), [])
    assert not state.learnt
    with pytest.raises(StateError, match="context row 12 was not learnt"):
        bench.run([*text, 5], range(12, 13), [])
    bench.drafter.release(RUN)
    assert RUN not in bench.drafter._runs


@pytest.mark.parametrize(
    ("strategy", "sampling"), crossed(EXACT, (Sampling(), Sampling(1.0, seed=4)), keep=4)
)
def test_texts_are_those_of_plain_decoding(
    family: Family, tmp_path: Path, strategy: str, sampling: Sampling
) -> None:
    """The stages sum up what the drafter taps; in a pipeline of three the sums come back late."""
    target = family("llama")
    drafter = save_block_drafter(tmp_path)
    taps = taps_of(str(drafter.path), target)
    assert taps is not None
    stages = [
        load_stage(target, layers, taps=taps, drafter=drafter)
        for layers in layer_ranges(target.layers, 3)
    ]
    prompt = tuple(range(30, 47))
    output = Reference(target).decode(prompt, 20, sampling)
    costs = profile_costs(load("jetson-7b"), 3, "head", hidden=True)
    loaded = load_sources(str(drafter.path), target, dtype="float32")
    text = Text(prompt, output, sampling)
    ran, found = simulate_stages(text, strategy, stages, target, loaded, costs)
    assert found == output
    assert ran.stats["tokens"] == len(output)


def test_a_target_with_known_text_returns_the_sums(family: Family, tmp_path: Path) -> None:
    """As simulations use them; a pass then drafts the same as with real stages."""
    target = family("llama")
    bench = Bench(tmp_path, target)
    taps = taps_of(str(tmp_path), target)
    assert taps is not None
    assert taps.layers == (1, 3, 5), "the rows after layers 0, 2 and 4"
    prompt = tuple(range(30, 47))
    reference = Reference(target)
    output = reference.decode(prompt, 12, Sampling())
    rows = reference.returned((*prompt, *output), taps)
    assert np.allclose(rows, bench.published.sums((*prompt, *output)).numpy(), atol=1e-4)
    text = Text(prompt, output, Sampling(), rows)
    costs = profile_costs(load("jetson-7b"), 3, "head", hidden=True)
    simulate(text, "flowspec", 3, target, bench.drafter, costs)


def test_spread_layers_are_the_published_ones() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(32, 5) == (1, 8, 15, 22, 29)
    assert spread_layers(36, 1) == (18,)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash2DraftModel of type qwen3"),
        ({"model_type": "llama"}, "is a DFlashDraftModel of type llama"),
        ({"block_size": 1}, "block_size is 1; expected a whole number from 2"),
        ({"num_target_layers": 36}, "for a target of 36 layers, and this one has 6"),
        ({"layer_types": ["sliding_attention"] * 2}, "has sliding_attention, which is not"),
        ({"markov_rank": 256}, "has markov_rank, which is not understood"),
        ({"target_hidden_size": 128}, "rows of 128 values with a hidden size of 64"),
        ({"dflash_config": {"mask_token_id": 500, "target_layer_ids": [1]}}, "mask token 500"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 5]}}, "taps layer 5"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, "is \\[1, 1\\]"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is None"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1], "selector_rank": 8}},
            "has selector_rank, which is not understood",
        ),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1], "causal": True}},
            "has causal, which is not understood",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    family: Family, tmp_path: Path, told: dict[str, Any], why: str
) -> None:
    drafter = save_block_drafter(tmp_path / "drafter", **told)
    with pytest.raises(ModelError, match=why):
        check_sources(family("llama"), str(drafter.path))


def test_a_drafter_of_another_target_is_refused(family: Family, tmp_path: Path) -> None:
    wide = save_block_drafter(tmp_path / "wide", hidden=128)
    with pytest.raises(ModelError, match="hidden size 128, the target 64"):
        check_sources(family("llama"), str(wide.path))
    cut = save_block_drafter(tmp_path / "cut", drop=["layers.1.self_attn.k_norm.weight"])
    with pytest.raises(ModelError, match=r"no tensor layers.1.self_attn.k_norm.weight"):
        load_block_drafter(cut, family("llama"))


def test_a_pipeline_can_name_it_as_a_draft_alone_or_as_a_choice(
    family: Family, tmp_path: Path
) -> None:
    target = family("llama")
    name = str(save_block_drafter(tmp_path / "drafter").path)
    check_sources(target, f"{name}:ngram")
    other = str(save_block_drafter(tmp_path / "other", block_size=4).path)
    with pytest.raises(ConfigError, match="has 2 heads"):
        check_sources(target, f"{name}:{other}")
    assert isinstance(load_sources(name, target, dtype="float32"), BlockDrafter)
    with pytest.raises(ConfigError, match="merges a block drafter"):
        check_sources(target, f"{name}+ngram")
    with pytest.raises(ConfigError, match="merges a block drafter"):
        load_sources(f"ngram+{name}", target)
    with pytest.raises(ModelError, match="a block drafter can only draft"):
        open_models(name, "ngram")
    with pytest.raises(StateError, match="cannot keep a block drafter's proposals"):
        load_sources(name, target, MemoDrafter)


def test_only_embedding_and_lm_head_of_the_target_are_needed(
    llama_copy: Path, tmp_path: Path
) -> None:
    drafter = save_block_drafter(tmp_path / "drafter")
    target = open_directory(str(llama_copy))
    prefixes = target_needs(str(drafter.path))(target)
    needed = {file for name, file in target.weight_files.items() if name.startswith(prefixes)}
    for file in set(target.weight_files.values()) - needed:
        file.unlink()
    check_sources(target, str(drafter.path))
    assert load_block_drafter(drafter, target).wants_hidden


def test_right_drafts_in_a_row_are_those_of_one_block(family: Family, tmp_path: Path) -> None:
    """The drafter's own text: every level of each position's block is compared with it."""
    bench = Bench(tmp_path, family("llama"))
    tokens = list(range(30, 40))
    levels = bench.drafter.levels
    while len(tokens) < 30:
        best = bench.logits(bench.published.sums(tokens[:-1]), tokens[-1:]).argmax(-1)
        tokens += best.tolist()[: len(tokens) % levels + 1]
    sums = bench.published.sums(tokens)
    text = PlainText(tuple(tokens[:10]), tuple(tokens[10:]), Sampling(), np.zeros(0), sums.numpy())
    wanted: list[list[bool]] = [[] for _ in range(3)]
    for at in range(9, len(tokens) - 1):
        best = bench.logits(sums[:at], [tokens[at]]).argmax(-1).tolist()
        right = [one == other for one, other in zip(best, tokens[at + 1 :], strict=False)]
        for depth in range(min(3, len(right))):
            wanted[depth].append(all(right[: depth + 1]))
    shares = acceptance_by_depth(bench.drafter, [text], 3)
    assert shares == pytest.approx([sum(one) / len(one) for one in wanted])
    assert 0 < shares[2] < shares[0]
