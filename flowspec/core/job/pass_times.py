"""Measured times of the slowest stage's pass by its number of rows."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.tree.segments import prefill_chunks

#: Most recent passes of one size that count.
PASS_SAMPLES = 8
#: A size with one sample and no pass among so many passes is left out, so that it is tried again:
#: its one time may have been an outlier. One with n samples is kept n squared times as long.
FORGOTTEN_AFTER = 256


class PassTimes:
    """Seconds of the slowest stage's pass by its rows, t(w), as measured.

    They are the pipeline's: all jobs learn from each other's passes, and from those they share.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # the pass noted last
        self._told_of: set[RunKey] = set()  # runs that have had an answer about it
        self._alone_in_company = False  # a lone row was in a pass with other runs' rows
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # by size, in powers of two
        self._noted: dict[int, int] = {}  # size -> index of its last sample
        self._notes = 0
        self._points: list[tuple[float, float]] = []

    def note(self, rows: int, seconds: float) -> None:
        """A pass over ``rows`` rows took ``seconds``."""
        size = (rows - 1).bit_length()
        self._notes += 1
        self._noted[size] = self._notes
        self._samples.setdefault(size, deque(maxlen=PASS_SAMPLES)).append((rows, seconds))
        points = []
        least = math.inf
        for other, samples in sorted(self._samples.items(), reverse=True):
            if self._notes - self._noted[other] >= FORGOTTEN_AFTER * len(samples) ** 2:
                continue
            # t(w) cannot fall with w: a longer time at fewer rows was a delayed stage.
            least = min(least, median(took for _, took in samples))
            points.append((median(count for count, _ in samples), least))
        self._points = points[::-1]

    def note_answer(self, rows: int, answer: Answer) -> None:
        """Learn from the answer to a segment of ``rows`` rows.

        Its slowest pass may have been over other runs' rows, too: their answers tell of one pass.
        """
        known = (max(rows, answer.rows), answer.seconds)
        self._alone_in_company |= rows == 1 < answer.rows
        if known == self._last and answer.run not in self._told_of:
            self._told_of.add(answer.run)
            return
        self._last = known
        self._told_of = {answer.run}
        self.note(*known)

    def note_prompt(self, rows: int, answer: Answer) -> None:
        """Learn from the answer to the last chunk of a prompt of ``rows`` rows."""
        if answer.seconds > 0:
            self.note_answer(len(prefill_chunks(rows)[-1]), answer)

    @property
    def single(self) -> float:
        """Seconds of a pass over one row, or over one in company if there is no other; 0: unknown.

        Where jobs share all passes, none is over a single row.
        """
        known = bool(self._points) and (self._points[0][0] == 1 or self._alone_in_company)
        return self._points[0][1] if known else 0.0

    @property
    def least_of_second(self) -> float:
        """Seconds by which the shortest pass over two rows is longer than that over one.

        0 while one of them is unknown.
        """
        one, two = (self._samples.get(size, ()) for size in (0, 1))
        least = min((took for _, took in one), default=math.inf)
        return max(0.0, min((took for _, took in two), default=0.0) - least)

    @property
    def widest(self) -> int:
        """Rows of the widest passes measured; 0: none."""
        return int(self._points[-1][0]) if self._points else 0

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows`` rows: linear between measured sizes and beyond the last.

        0 before anything was measured.
        """
        points = self._points
        if len(points) < 2 or rows <= points[0][0]:
            return points[0][1] if points else 0.0
        above = next((at for at, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
        (low, fast), (high, slow) = points[above - 1 : above + 1]
        return fast + (slow - fast) * (rows - low) / (high - low)
