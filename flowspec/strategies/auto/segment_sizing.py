"""How many rows a segment has, how long it is drafted for, and how many segments are in flight.

A row's gain is the number of tokens it is expected to commit. A segment of w rows occupies the
slowest part, a stage, a link or the drafter, for t(w) seconds, in which the job would make ``rate *
t(w)`` tokens. Rows are therefore added, best first, while they add more expected tokens than
``DELAY_FACTOR`` times that number. Where rows cost nothing a segment is wide; where a link is
slow, a second row expensive or the tree uncertain, it is narrow. The expected tokens of all rows
sent add up to the text, so the choice with the largest gain makes the most tokens per second.

The rate is the job's own, and at its beginning that of the previous job (``cost_history``).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from flowspec.core.protocol.messages import Answer
from flowspec.core.session.round_trip import RoundTrip
from flowspec.strategies.auto.cost_history import CostHistory

#: Most rows of a segment.
MOST_ROWS = 128
#: Rows allowed as soon as a pass over one row has been measured.
FIRST_ROWS = 8
#: Most rows relative to the widest pass measured, the prompt's passes included.
WIDENING = 2
#: Seconds of the job per second of the slowest part: a segment delays all stages, one after the
#: other, and after a miss nothing is in flight to fill them. Fitted on the tuning prompts
#: (`ops/bench/archive/auto-constants.md`).
DELAY_FACTOR = 2.0
#: Weight of the previous job's rate, in tokens.
PRIOR_TOKENS = 8
#: Most passes of the drafter that a free slot waits for.
MOST_PASSES = 8
#: Most recent segments whose median size sets the time for drafting.
RECENT_SEGMENTS = 16
#: Most changes of size that are recorded.
MOST_DECISIONS = 100


@dataclass(frozen=True, slots=True)
class Sizing:
    """At most ``rows`` rows in a segment, drafted in at most ``passes`` passes, and at most
    ``in_flight`` segments in flight.
    """

    rows: int
    passes: int
    in_flight: int


class SegmentSizer:
    """One job's sizes on a pipeline of ``stages`` stages.

    ``rows``: a fixed number of rows per segment; 0: chosen by price. ``delay``: of the price, as
    ``DELAY_FACTOR``.
    """

    def __init__(
        self, stages: int, history: CostHistory, rows: int = 0, delay: float = DELAY_FACTOR
    ) -> None:
        self._stages = stages
        self._history = history
        self.fixed_rows = rows
        self._delay = delay
        self._rate_before = self.rate = history.rate
        # The prompt's round trip and slowest pass, until a single row has made its round trip.
        self._prompt: tuple[RoundTrip, float] | None = None
        self._recent: deque[int] = deque(maxlen=RECENT_SEGMENTS)
        self._segments = 0
        self._draft_pass_seconds = 0.0
        #: (segments before, rows at most, a power of two) at every change of size.
        self.decisions: list[tuple[int, int]] = []

    def prefilled(self, trip: RoundTrip, answer: Answer) -> None:
        """Learn from the prompt's trip and the answer to its last chunk."""
        self._history.passes.note_prompt(trip.rows, answer)
        if answer.seconds > 0:
            self._prompt = (trip, answer.seconds)

    def observe(self, answer: Answer, trip: RoundTrip, *, tokens: int, seconds: float) -> None:
        """Learn from an answer. Before it, the job decoded ``tokens`` tokens in ``seconds``."""
        history = self._history
        was_pruned = 2 * len(answer.ids) < trip.rows
        if answer.seconds > 0 and not was_pruned:
            history.passes.note_answer(trip.rows, answer)
        if self._prompt and trip.alone and trip.rows == 1:
            history.note_prompt(*self._prompt, trip, self._stages)
            self._prompt = None
        single = history.passes.single
        before = self._rate_before or (1 / (self._stages * single) if single else 0.0)
        if not seconds:
            self.rate = before
            return
        if before:
            self.rate = (tokens + PRIOR_TOKENS) / (seconds + PRIOR_TOKENS / before)
        else:
            self.rate = tokens / seconds
        history.rate = self.rate

    def sizing(self, bandwidth_delay: int, draft_pass_seconds: float) -> Sizing:
        """The sizes for the next segment.

        ``bandwidth_delay``: segments that hide the round trip; 0: unknown. ``draft_pass_seconds``:
        seconds per pass of the drafter; 0: unknown.
        """
        self._draft_pass_seconds = draft_pass_seconds
        step = self._seconds(int(median(self._recent))) if self._recent else 0.0
        passes = math.ceil(step / draft_pass_seconds) if step and draft_pass_seconds else 2
        return Sizing(
            self._most_rows(),
            max(1, min(MOST_PASSES, passes)),
            max(self._stages, bandwidth_delay - 2),
        )

    def price(self, rows: int) -> float:
        """Expected tokens that a segment of ``rows`` rows has to add."""
        return self._delay * self.rate * self._seconds(rows)

    @property
    def pass_price(self) -> float:
        """Tokens that the job makes during a pass of the drafter; 0 until one has been timed."""
        return self.rate * self._draft_pass_seconds

    def chose(self, rows: int) -> None:
        """A segment of ``rows`` rows was cut."""
        size = 1 << (rows - 1).bit_length()
        changed = not self.decisions or self.decisions[-1][1] != size
        if changed and len(self.decisions) < MOST_DECISIONS:
            self.decisions.append((self._segments, size))
        self._segments += 1
        self._recent.append(rows)

    def _most_rows(self) -> int:
        """Rows to choose among; one until a pass over one row has been measured."""
        passes = self._history.passes
        if self.fixed_rows:
            return self.fixed_rows
        if not passes.single:
            return 1
        return min(MOST_ROWS, max(FIRST_ROWS, WIDENING * passes.widest))

    def _seconds(self, rows: int) -> float:
        """t(w): of the slowest stage, or of a link or a pass of the drafter that takes longer."""
        history = self._history
        return max(history.passes.at(rows), rows * history.row_seconds, self._draft_pass_seconds)
