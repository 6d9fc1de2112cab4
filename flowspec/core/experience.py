"""What jobs have taught the draft worker of its pipeline, kept from one job to the next.

A pipeline's pass times, its links and what its drafter's word is worth do not change with the prompt, and a
job of fifty tokens is over before it has found them out by itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from flowspec.core.calibrate import Calibration, Scaling
from flowspec.core.segments import prefill_chunks

#: Samples remembered: passes of one size, trips of a lone row.
PASSES, TRIPS = 8, 16
#: Rows from which a prompt's trip tells how long a link takes for one.
PROMPT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Trip:
    """A segment's way through the pipeline and back: ``rows`` sent, ``seconds`` from launch to answer;
    ``alone``: it met no other segment of its job."""

    rows: int
    seconds: float
    alone: bool


class PassTimes:
    """Seconds of the slowest stage's pass by its rows, from what was measured."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # by size, in powers of two
        self._points: list[tuple[float, float]] = []

    def note(self, rows: int, seconds: float) -> None:
        """A pass over ``rows`` rows took ``seconds``."""
        self._samples.setdefault((rows - 1).bit_length(), deque(maxlen=PASSES)).append((rows, seconds))
        self._points, longest = [], 0.0
        for _, samples in sorted(self._samples.items()):
            longest = max(longest, median(took for _, took in samples))
            self._points.append((median(count for count, _ in samples), longest))

    @property
    def single(self) -> float:
        """Seconds of a pass over one row; 0: none was measured."""
        return self._points[0][1] if 0 in self._samples else 0.0

    @property
    def widest(self) -> int:
        """Rows of the widest passes measured; 0: none were."""
        return int(self._points[-1][0]) if self._points else 0

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows`` rows: straight lines between what was measured, the last of which
        goes on; 0 before anything was."""
        points = self._points
        if len(points) < 2 or rows <= points[0][0]:
            return points[0][1] if points else 0.0
        above = next((at for at, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
        (low, fast), (high, slow) = points[above - 1 : above + 1]
        return fast + (slow - fast) * (rows - low) / (high - low)


class Experience:
    """Times of one pipeline and what its drafter is worth, as far as they are known."""

    def __init__(self) -> None:
        self.passes = PassTimes()
        #: Tokens a second of the job before; 0: there was none.
        self.rate = 0.0
        self._prompt: tuple[int, float, float] | None = None  # rows, seconds of the trip, of its last pass
        self._lone: deque[float] = deque(maxlen=TRIPS)
        self._calibrations: dict[bool, Calibration | Scaling] = {}

    def calibration(self, coupled: bool) -> Calibration | Scaling:
        """What candidates were worth; ``coupled``: the drafters see the target's noise."""
        if coupled not in self._calibrations:
            self._calibrations[coupled] = Calibration(True) if coupled else Scaling()
        return self._calibrations[coupled]

    def prefilled(self, trip: Trip, slowest: float) -> None:
        """A prompt went through, its last chunk with a ``slowest`` pass of so many seconds."""
        if trip.rows >= PROMPT_ROWS and slowest > 0:
            self.passes.note(len(prefill_chunks(trip.rows)[-1]), slowest)
            self._prompt = (trip.rows, trip.seconds, slowest)

    def answered(self, trip: Trip, slowest: float) -> None:
        """A segment of a tree came back; ``slowest``: seconds of its slowest pass, 0: not measured."""
        if slowest > 0:
            self.passes.note(trip.rows, slowest)
        if trip.alone and trip.rows == 1:
            self._lone.append(trip.seconds)

    def row_seconds(self, stages: int) -> float:
        """How long one row occupies a link between two of ``stages`` stages; 0: not known, or nothing.

        The trips of a prompt and of a lone row cross the same links with the same latency. What the prompt took
        longer, and no stage computed, its rows took on the links. It came in chunks that followed each
        other, as fast as a link or a stage let them.
        """
        if self._prompt is None or not self._lone or not self.passes.single:
            return 0.0
        rows, seconds, slowest = self._prompt
        chunks = prefill_chunks(rows)
        size, links = len(chunks[-1]), max(1, stages - 1)
        extra = seconds - min(self._lone) - stages * (slowest - self.passes.single)
        bound = extra / (size * (links + len(chunks) - 1))
        if bound * size < slowest:
            bound = (extra - (len(chunks) - 1) * slowest) / (size * links)
        return max(0.0, bound)
