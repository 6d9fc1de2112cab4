"""Deciding while a job runs what a segment's rows may cost, how long to draft for it, how many are
in flight.

A row is worth the tokens it is expected to commit. A segment of w rows keeps the pipeline's
slowest part, a stage or a link, busy for t(w) seconds, and in that time the job would else have
made ``rate * t(w)`` tokens. So rows go into a segment, best first, while they add more tokens
than ``WEIGHT`` times that: where rows are free a segment is wide, where a link is slow or a
second row costs four times the first it is narrow, and where the tree is uncertain everything it
holds is worth little. The sum over all segments of what their rows are worth is the text, so the
choice that gains most each time makes the most tokens a second.

The rate is the job's own, and in the beginning that of the job before (``core.experience``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from flowspec.core.experience import Experience, Trip
from flowspec.core.messages import Result
from flowspec.core.segments import prefill_chunks

#: Most rows of a segment; how many may be tried once a pass of one is known; by how much a segment
#: may be wider than any pass that was measured, the prompt's included.
MOST_ROWS = 128
FEW_ROWS = 8
WIDER = 2
#: What a second of the slowest part costs, in seconds of the job: the stages a segment delays lie
#: one behind the other, and after a miss nothing is behind it to fill them.
WEIGHT = 3.0
#: Tokens the rate of the job before counts for.
MEMORY = 8
#: Most passes of the drafter a free slot waits for.
PASSES = 8
#: Segments whose size the drafter's time is planned for.
RECENT = 16
#: Most changes of size that are written down.
DECISIONS = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """At most ``rows`` of a segment, drafted in at most ``passes`` passes; ``in_flight`` segments
    on their way.
    """

    rows: int
    passes: int
    in_flight: int


class Controller:
    """One job's decisions, for a pipeline of ``stages``; ``rows`` fixes the rows where they are
    given.
    """

    def __init__(self, stages: int, experience: Experience, rows: int = 0) -> None:
        self._stages = stages
        self._experience = experience
        self.fixed = rows
        self._before = self._rate = experience.rate
        self._prompt: tuple[Trip, float] | None = None  # until a lone row has gone the same way
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._segments = 0
        #: Sizes chosen: (segments before, rows at most, a power of two) at every change.
        self.decisions: list[tuple[int, int]] = []

    def prefilled(self, trip: Trip, slowest: float) -> None:
        """The prompt made ``trip``; the slowest pass over its last chunk took so many seconds."""
        if slowest > 0:
            self._experience.passes.note(len(prefill_chunks(trip.rows)[-1]), slowest)
            self._prompt = (trip, slowest)

    def hear(self, result: Result, trip: Trip, *, tokens: int, seconds: float) -> None:
        """Learn from an answer. Before it ``tokens`` tokens were decoded in ``seconds``, the first
        one not counted.
        """
        known = self._experience
        if result.seconds > 0 and 2 * len(result.ids) >= trip.rows:  # else it was pruned on its way
            known.passes.note(trip.rows, result.seconds)
        if self._prompt and trip.alone and trip.rows == 1:
            known.crossed(*self._prompt, trip, self._stages)
            self._prompt = None
        single = known.passes.single
        before = self._before or (1 / (self._stages * single) if single else 0.0)
        if not seconds:
            self._rate = before
        else:
            self._rate = (
                (tokens + MEMORY) / (seconds + MEMORY / before) if before else tokens / seconds
            )
            known.rate = self._rate

    def plan(self, covering: int, draft_seconds: float) -> Plan:
        """What holds now. ``covering``: segments that hide the way (0: unknown); ``draft_seconds``:
        of a pass.
        """
        step = self._seconds(int(median(self._recent))) if self._recent else 0.0
        passes = int(step / draft_seconds) if step and draft_seconds else 2
        return Plan(self._most(), max(1, min(PASSES, passes)), max(self._stages, covering - 2))

    def price(self, rows: int) -> float:
        """Tokens that a segment of ``rows`` rows has to bring in."""
        return WEIGHT * self._rate * self._seconds(rows)

    def chose(self, rows: int) -> None:
        """A segment of ``rows`` rows was cut."""
        size = 1 << (rows - 1).bit_length()
        if len(self.decisions) < DECISIONS and (
            not self.decisions or self.decisions[-1][1] != size
        ):
            self.decisions.append((self._segments, size))
        self._segments += 1
        self._recent.append(rows)

    def _most(self) -> int:
        """Rows to choose among: before a pass of one is known nobody knows whether
        more are dear.
        """
        passes = self._experience.passes
        if self.fixed:
            return self.fixed
        return min(MOST_ROWS, max(FEW_ROWS, WIDER * passes.widest)) if passes.single else 1

    def _seconds(self, rows: int) -> float:
        """t(w): of the slowest stage, or of a link where that is longer."""
        known = self._experience
        return max(known.passes.at(rows), rows * known.row_seconds)
