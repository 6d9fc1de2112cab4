"""What passes and links of one pipeline cost, as measured, kept from job to job.

These costs do not depend on the prompt, and a job of fifty tokens ends before it has measured them
by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.tree.segments import prefill_chunks
from flowspec.strategies.auto.drafter_bandit import DrafterSpeed

#: Passes of one size that are remembered.
PASS_SAMPLES = 8
#: Prompts whose round trips are remembered.
PROMPT_SAMPLES = 8
#: Passes of any size after which a size not seen again is forgotten: its time may have been an
#: accident.
FORGOTTEN_AFTER = 256
#: Rows from which on a prompt's round trip shows what a link takes for one row.
PROMPT_ROWS = 8


class PassTimes:
    """Seconds of the slowest stage's pass by its rows, t(w), as measured."""

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
        self._samples.setdefault(size, deque(maxlen=PASS_SAMPLES)).append((rows, seconds))
        horizon = self._notes - FORGOTTEN_AFTER
        for other in [other for other, at in self._noted.items() if at <= horizon]:
            del self._noted[other]
            del self._samples[other]
        points = []
        least = math.inf
        for _, samples in sorted(self._samples.items(), reverse=True):
            # A pass takes no longer than one over more rows: a longer time was a delayed stage.
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
        """Seconds of a pass over ``rows`` rows: linear between measured sizes and beyond the last.

        0 before anything was measured.
        """
        points = self._points
        if len(points) < 2 or rows <= points[0][0]:
            return points[0][1] if points else 0.0
        above = next((at for at, (known, _) in enumerate(points) if known >= rows), len(points) - 1)
        (low, fast), (high, slow) = points[above - 1 : above + 1]
        return fast + (slow - fast) * (rows - low) / (high - low)


class CostHistory:
    """Measured costs of one pipeline, as far as they are known.

    Each job measures for itself: of jobs that share passes and links, each counts the others' time
    as the time of its own rows.
    """

    def __init__(self) -> None:
        self.passes = PassTimes()
        #: Tokens per second of the job that was answered last; 0: there was none.
        self.rate = 0.0
        #: Seconds one row occupies a link between two stages; 0: unknown, or nothing.
        self.row_seconds = 0.0
        #: Speed with every drafter by its number, kept apart for (coupled, sampled) jobs.
        self.speeds = defaultdict[tuple[bool, bool], dict[int, DrafterSpeed]](dict)
        self._row_samples: deque[float] = deque(maxlen=PROMPT_SAMPLES)

    def note_prompt(
        self, prompt: RoundTrip, slowest: float, single: RoundTrip, stages: int
    ) -> None:
        """A prompt made its round trip through ``stages`` stages, and after it a ``single`` row.

        ``slowest``: seconds of the slowest pass over the prompt's last chunk. Both cross the same
        links at the same latency, so what the prompt took longer and no stage computed is the time
        its rows took on the links. Its chunks followed each other as fast as a link or a stage let
        them.
        """
        if prompt.rows < PROMPT_ROWS or not self.passes.single:
            return
        chunks = prefill_chunks(prompt.rows)
        size = len(chunks[-1])
        links = max(1, stages - 1)
        extra = prompt.seconds - single.seconds - stages * (slowest - self.passes.single)
        per_row = extra / (size * (links + len(chunks) - 1))
        if per_row * size < slowest:
            per_row = (extra - (len(chunks) - 1) * slowest) / (size * links)
        self._row_samples.append(max(0.0, per_row))
        self.row_seconds = median(self._row_samples)
