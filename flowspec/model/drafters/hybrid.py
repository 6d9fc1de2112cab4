"""Several drafters merged into one tree: all draft for every node, and their best are proposed.

Their values cannot be compared: one gives log-probabilities, another a prior, a third gaps. So
candidates are merged by rank and labelled with their source, and the session calibrates the
values of each source (``core.drafting.calibration``). Source: the hybrid token source of
docs/algorithms.md#draft-sources.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.drafting.drafting import MOST_SOURCES
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor, RowArray, evict, first_facts, keeping


class HybridDrafter:
    """Merges the proposals of ``sources`` by rank, then by source; each token occurs once.

    A token of several sources is credited to the one that ranks it best, ties to the earlier
    source, with that source's value. ``DraftDone.sources`` holds indices into ``sources``, none
    of which is a hybrid.
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

    def facts(self) -> dict[str, object]:
        """See ``first_facts``."""
        return first_facts(self._sources)

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        for source in self._sources:
            source.allocate(run, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        for source in self._sources:
            source.release(run)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below. All sources have the same rows."""
        for source in self._sources:
            keeping(source).keep(run, caches)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        for one in self._sources:
            keeping(one).resume(run, source, held)

    def evict(self, run: RunKey) -> None:
        for source in self._sources:
            evict(source, run)

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if a source leaves out a row or a value."""
        return _merge(work, [source.run(work) for source in self._sources])

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        """As ``DraftExecutor.run_together``, each source over all of ``works``."""
        by_source = [source.run_together(works) for source in self._sources]
        return [
            _merged_outcome(work, answers)
            for work, answers in zip(works, zip(*by_source, strict=True), strict=True)
        ]

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """Pass the rows to the sources that want them; StateError if none does."""
        if not self.wants_hidden:
            raise StateError("no source of this hybrid drafts from hidden rows")
        for source in self._sources:
            if source.wants_hidden:
                source.learn(run, ids, rows)


def _merged_outcome(
    work: Draft, answers: Sequence[DraftDone | WorkFailed]
) -> DraftDone | WorkFailed:
    done = [answer for answer in answers if isinstance(answer, DraftDone)]
    failed = [answer for answer in answers if isinstance(answer, WorkFailed)]
    if failed:
        return failed[0]
    try:
        return _merge(work, done)
    except StateError as error:
        return WorkFailed(str(error))


def _merge(work: Draft, answers: Sequence[DraftDone]) -> DraftDone:
    """One answer to ``work`` from those of all sources."""
    rows = len(work.part.answers)
    for number, answer in enumerate(answers):
        lengths = [len(row) for row in answer.tokens]
        if len(lengths) != rows or lengths != [len(row) for row in answer.values]:
            raise StateError(
                f"source {number} must answer for each of {rows} rows, with a value for each token"
            )
    merged = [_merged(answers, row, work.width) for row in range(rows)]
    return DraftDone(
        tuple(tuple(token for token, _, _ in row) for row in merged),
        tuple(tuple(value for _, value, _ in row) for row in merged),
        tuple(tuple(source for _, _, source in row) for row in merged),
    )


def _merged(answers: Sequence[DraftDone], row: int, width: int) -> list[tuple[int, float, int]]:
    """One row's best ``width`` candidates as (token, value, source)."""
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
