"""Every strategy with a block drafter: the text is the target's, and a pass serves many levels."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import pytest

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import BlockDone, BlockDraft, Draft, LevelProposals
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.strategies import EXACT
from tests.toy import PROMPT, TARGET, generate

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=1)
VARIANTS = [
    *EXACT,
    "flowspec:lockstep=on",
    "pipedec:barrier=off",
    "specpipe:levels=2",
    "specpipe:width=auto",
    "chain:window=5,in_flight=3",
    "static_tree:overlap=on",
]


@functools.cache
def _next(text: tuple[int, ...], sampling: Sampling) -> int:
    if len(text) >= TARGET.context:
        return 0
    return TARGET.decode(text, 1, sampling)[0]


class ToyBlocks:
    """Proposes the target's own continuation of a path, each token at rate ``hit_rate``.

    It checks what a block drafter relies on: context rows come once and in order, and a pass has
    all tree rows between the context and an answered row.
    """

    wants_hidden = False

    def __init__(self, levels: int, hit_rate: float) -> None:
        self.levels = levels
        self.passes = 0
        self.blocks = 0
        self._hit_rate = hit_rate
        self._runs: dict[RunKey, tuple[list[int], Sampling]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = ([], sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("the toy drafts from tokens alone")

    def run(self, work: Draft) -> BlockDone:
        part = work.part
        assert isinstance(work, BlockDraft)
        assert work.levels == self.levels
        context, sampling = self._runs[part.run]
        first = part.context
        assert part.positions[:first] == tuple(range(len(context), len(context) + first))
        context += part.tokens[:first]
        self.passes += bool(part.answers)
        self.blocks += len(part.answers)
        places = {node: at for at, node in enumerate(part.ids) if at >= first}
        found = []
        rows = first
        for row in part.answers:
            path = [row]
            while part.parents[path[-1]] in places:
                path.append(places[part.parents[path[-1]]])
            assert part.positions[path[-1]] == len(context)
            rows += len(path) + self.levels
            text = [*context, *(part.tokens[at] for at in reversed(path))]
            found.append(self._block(text, sampling, work.width))
        assert work.rows == rows
        return BlockDone(
            tuple(levels[0].tokens for levels in found),
            tuple(levels[0].values for levels in found),
            below=tuple(tuple(levels[1:]) for levels in found),
        )

    def _block(self, text: Sequence[int], sampling: Sampling, width: int) -> list[LevelProposals]:
        right: list[int] = []
        while len(right) < self.levels:
            right.append(_next((*text, *right), sampling))
        return [self._level(token, len(text) + level, width) for level, token in enumerate(right)]

    def _level(self, right: int, position: int, width: int) -> LevelProposals:
        luck = zlib.crc32(f"{position} {right}".encode()) % 1000
        tokens = [token for token in range(position % 7, 60) if token != right]
        if luck < 1000 * self._hit_rate:
            tokens.insert(luck % 2, right)
        count = min(width, len(tokens))
        return LevelProposals(tuple(tokens[:count]), tuple(-0.3 * (at + 1) for at in range(count)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("stages", "levels", "hit_rate"), [(1, 4, 0.8), (3, 1, 0.6), (4, 5, 0.9)])
def test_ids_equal_plain_decoding(variant: str, stages: int, levels: int, hit_rate: float) -> None:
    for sampling in (GREEDY, SAMPLED):
        drafter = ToyBlocks(levels, hit_rate)
        record = generate(variant, stages, sampling=sampling, count=24, drafter=drafter)
        assert record.finish is not None
        assert record.finish.error == ""
        assert tuple(record.tokens) == TARGET.decode(PROMPT, 24, sampling)
        assert record.finish.stats["draft_passes"] >= drafter.passes


@pytest.mark.parametrize("variant", ["naive_pp", "pruned_pp", "speculative", "static_tree"])
def test_a_round_takes_one_pass(variant: str) -> None:
    """The tree of a round is at most eight levels deep; the last round may end before it drafts."""
    drafter = ToyBlocks(8, 0.8)
    record = generate(variant, 4, count=48, drafter=drafter)
    assert record.finish is not None
    rounds = record.finish.stats["rounds"]
    assert drafter.passes == drafter.blocks
    assert drafter.passes in (rounds, rounds - 1)
    assert record.finish.stats["draft_passes"] == drafter.passes


def test_flowspec_drafts_once_per_root() -> None:
    """Proposals are dropped at every verdict, as a head's are, and one pass gives all levels."""
    drafter = ToyBlocks(8, 0.9)
    record = generate("flowspec:expand=off", 4, count=48, drafter=drafter)
    commits = len(record.committed_at)
    assert drafter.passes <= commits


def test_further_levels_come_from_further_passes() -> None:
    """A tree of seven levels by blocks of two takes four passes: for levels 1, 3, 5 and 7."""
    drafter = ToyBlocks(2, 1.0)
    record = generate("naive_pp", 4, count=48, drafter=drafter)
    assert record.finish is not None
    rounds = record.finish.stats["rounds"]
    assert 4 * (rounds - 1) <= drafter.passes <= 4 * rounds


def test_a_wide_layer_takes_few_blocks() -> None:
    """The best eight of a level have one each; others share theirs."""
    drafter = ToyBlocks(8, 0.7)
    generate("specpipe:width=64", 4, count=30, drafter=drafter)
    assert drafter.blocks <= 12 * drafter.passes
