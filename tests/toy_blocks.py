"""A block drafter over the toy model."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import BlockDone, BlockDraft, Draft, Kept, LevelProposals
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import DraftsAlone, RowArray
from tests.toy import TARGET


@functools.cache
def _next(text: tuple[int, ...], sampling: Sampling) -> int:
    if len(text) >= TARGET.context:
        return 0
    return TARGET.decode(text, 1, sampling)[0]


class ToyBlocks(DraftsAlone):
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
        self._kept: dict[RunKey, list[int]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = ([], sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        (wanted,) = caches
        assert wanted.rows <= len(self._runs[run][0])
        self._kept[run] = self._runs[run][0][: wanted.rows]

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        self._runs[run][0].extend(self._kept[source][:rows])

    def evict(self, run: RunKey) -> None:
        self._kept.pop(run, None)

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
