"""What jobs have taught the draft worker of its pipeline, kept from one job to the next.

A pipeline's pass times, its links and what its drafter's word is worth do not change with the
prompt, and a job of fifty tokens is over before it has found them out by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

from flowspec.core.calibrate import Calibration, Scaling
from flowspec.core.contest import Speed
from flowspec.core.segments import prefill_chunks

#: Samples remembered: passes of one size, prompts' trips.
PASSES = 8
PROMPTS = 8
#: Passes of any size after which one that was not seen again is forgotten: what it took may have
#: been an accident.
FORGOTTEN = 256
#: Rows from which a prompt's trip tells how long a link takes for one.
PROMPT_ROWS = 8


@dataclass(frozen=True, slots=True)
class Trip:
    """A segment's way through the pipeline and back: ``rows`` sent, ``seconds`` from launch to
    answer; ``alone``: it met no other segment of its job.
    """

    rows: int
    seconds: float
    alone: bool


class PassTimes:
    """Seconds of the slowest stage's pass by its rows, from what was measured."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # by size, in powers of two
        self._noted: dict[int, int] = {}  # size -> the number of its last note
        self._notes = 0
        self._points: list[tuple[float, float]] = []

    def note(self, rows: int, seconds: float) -> None:
        """A pass over ``rows`` rows took ``seconds``."""
        size = (rows - 1).bit_length()
        self._notes += 1
        self._noted[size] = self._notes
        self._samples.setdefault(size, deque(maxlen=PASSES)).append((rows, seconds))
        for other in [other for other, at in self._noted.items() if at <= self._notes - FORGOTTEN]:
            del self._noted[other], self._samples[other]
        points = []
        least = math.inf
        for _, samples in sorted(self._samples.items(), reverse=True):
            # A pass is no slower than one over more rows: a stage that was held up says nothing of
            # its rows.
            least = min(least, median(took for _, took in samples))
            points.append((median(count for count, _ in samples), least))
        self._points = points[::-1]

    @property
    def single(self) -> float:
        """Seconds of a pass over one row; 0: none was measured."""
        return self._points[0][1] if 0 in self._samples else 0.0

    @property
    def widest(self) -> int:
        """Rows of the widest passes measured; 0: none were."""
        return int(self._points[-1][0]) if self._points else 0

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows`` rows: straight lines between what was measured, the last
        of which goes on; 0 before anything was.
        """
        points = self._points
        if len(points) < 2 or rows <= points[0][0]:
            return points[0][1] if points else 0.0
        above = next((at for at, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
        (low, fast), (high, slow) = points[above - 1 : above + 1]
        return fast + (slow - fast) * (rows - low) / (high - low)


class Experience:
    """Times of one pipeline and what its drafter is worth, as far as they are known.

    They are a job's own view: of jobs that share passes and links each takes the others' time
    for its rows'.
    """

    def __init__(self) -> None:
        self.passes = PassTimes()
        #: Tokens a second of the job that was answered last; 0: there was none.
        self.rate = 0.0
        #: How long one row occupies a link between two stages; 0: not known, or nothing.
        self.row_seconds = 0.0
        self._crossings: deque[float] = deque(maxlen=PROMPTS)
        self._calibrations: dict[tuple[bool, bool], Calibration | Scaling] = {}
        #: Tokens a second with every drafter by its number, by what calibrations are kept by.
        self.speeds = defaultdict[tuple[bool, bool], dict[int, Speed]](dict)

    def calibration(self, *, coupled: bool, sampled: bool) -> Calibration | Scaling:
        """What candidates were worth; ``coupled``: the drafters see the target's noise,
        ``sampled``: it has some.
        """
        key = (coupled, sampled)
        if key not in self._calibrations:
            self._calibrations[key] = Calibration(True) if coupled else Scaling()
        return self._calibrations[key]

    def crossed(self, prompt: Trip, slowest: float, lone: Trip, stages: int) -> None:
        """A prompt went through ``stages`` stages, its last chunk with a ``slowest`` pass of so
        many seconds, and after it a ``lone`` row.

        Both cross the same links with the same latency. What the prompt took longer, and no
        stage computed, its rows took on the links. It came in chunks that followed each other,
        as fast as a link or a stage let them.
        """
        if prompt.rows < PROMPT_ROWS or not self.passes.single:
            return
        chunks = prefill_chunks(prompt.rows)
        size = len(chunks[-1])
        links = max(1, stages - 1)
        extra = prompt.seconds - lone.seconds - stages * (slowest - self.passes.single)
        bound = extra / (size * (links + len(chunks) - 1))
        if bound * size < slowest:
            bound = (extra - (len(chunks) - 1) * slowest) / (size * links)
        self._crossings.append(max(0.0, bound))
        self.row_seconds = median(self._crossings)
