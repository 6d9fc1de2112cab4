"""Several drafters merged into one tree: every one drafts for every node, and the best of each are
in.

Their values cannot be compared: one gives log-probabilities, another a prior, a third gaps. So
nothing is compared here. Candidates are merged by rank and say who proposed them, and the
session finds out what each drafter's word is worth (``core.calibrate``). Source: the hybrid
token source of ``algorithms.md`` 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.drafting.drafting import MOST_SOURCES
from flowspec.core.protocol.machine import Draft, DraftDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor, RowArray


class HybridDrafter:
    """Proposes what ``sources`` propose, by rank and within a rank by source, each token once.

    A token of several sources counts for the one that ranks it best, the earlier one of equals,
    with that source's own value. ``DraftDone.sources`` holds indices into ``sources``, none of
    which is a hybrid.
    """

    def __init__(self, sources: Sequence[DraftExecutor]) -> None:
        """ConfigError without ``sources``, or with more than ``MOST_SOURCES``."""
        if not sources:
            raise ConfigError("a hybrid drafter has no sources; expected at least one drafter")
        if len(sources) > MOST_SOURCES:
            raise ConfigError(
                f"a hybrid drafter has {len(sources)} sources; expected {MOST_SOURCES} at most"
            )
        self._sources = tuple(sources)

    @property
    def wants_hidden(self) -> bool:
        return any(source.wants_hidden for source in self._sources)

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        for source in self._sources:
            source.allocate(job, capacity, sampling, returns)

    def release(self, job: str) -> None:
        for source in self._sources:
            source.release(job)

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if a source does not answer for every
        row and token.
        """
        answers = [source.run(work) for source in self._sources]
        rows = len(work.part.answers)
        for number, answer in enumerate(answers):
            lengths = [len(row) for row in answer.tokens]
            if len(lengths) != rows or lengths != [len(row) for row in answer.values]:
                raise StateError(
                    f"source {number} owes an answer for each of {rows} rows, a value for each "
                    "token"
                )
        merged = [_merged(answers, row, work.width) for row in range(rows)]
        return DraftDone(
            tuple(tuple(token for token, _, _ in row) for row in merged),
            tuple(tuple(value for _, value, _ in row) for row in merged),
            tuple(tuple(source for _, _, source in row) for row in merged),
        )

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """Passed on to the sources that want it; StateError if none does."""
        if not self.wants_hidden:
            raise StateError("no source of this hybrid drafts from hidden rows")
        for source in self._sources:
            if source.wants_hidden:
                source.learn(job, ids, rows)


def _merged(answers: Sequence[DraftDone], row: int, width: int) -> list[tuple[int, float, int]]:
    """The first ``width`` of (token, value, source) for one row."""
    entries = sorted(
        (rank, source, token, value)
        for source, answer in enumerate(answers)
        for rank, (token, value) in enumerate(
            zip(answer.tokens[row], answer.values[row], strict=True)
        )
    )
    found: dict[int, tuple[int, float, int]] = {}
    for _, source, token, value in entries:
        found.setdefault(token, (token, value, source))
    return list(found.values())[:width]
