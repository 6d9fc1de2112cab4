"""Measured costs of one pipeline's passes and links, kept from job to job.

These costs do not depend on the prompt, and a job of fifty tokens ends before it has measured them
itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.tree.segments import prefill_chunks
from flowspec.strategies.auto.drafter_bandit import DrafterSpeed

#: Most recent passes of one size that count.
PASS_SAMPLES = 8
#: Most recent prompts whose round trips count.
PROMPT_SAMPLES = 8
#: A size without a pass among so many passes is dropped: its one time may have been an outlier.
FORGOTTEN_AFTER = 256
#: Least rows of a prompt whose round trip is used to measure a link's seconds per row.
PROMPT_ROWS = 8


class PassTimes:
    """Seconds of the slowest stage's pass by its rows, t(w), as measured."""

    def __init__(self) -> None:
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
        horizon = self._notes - FORGOTTEN_AFTER
        for other in [other for other, at in self._noted.items() if at <= horizon]:
            del self._noted[other]
            del self._samples[other]
        points = []
        least = math.inf
        for _, samples in sorted(self._samples.items(), reverse=True):
            # t(w) cannot fall with w: a longer time at fewer rows was a delayed stage.
            least = min(least, median(took for _, took in samples))
            points.append((median(count for count, _ in samples), least))
        self._points = points[::-1]

    @property
    def single(self) -> float:
        """Seconds of a pass over one row; 0: not measured."""
        return self._points[0][1] if 0 in self._samples else 0.0

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


class CostHistory:
    """Measured costs of one pipeline, as far as they are known.

    Where jobs share passes and links, each job attributes the others' time to its own rows.
    """

    def __init__(self) -> None:
        self.passes = PassTimes()
        #: Tokens per second of the job that decoded last; 0: there was none.
        self.rate = 0.0
        #: Seconds that one row occupies a link between two stages; 0: unknown or negligible.
        self.row_seconds = 0.0
        #: Speeds by drafter number, kept apart by a job's (coupled, sampled).
        self.speeds = defaultdict[tuple[bool, bool], dict[int, DrafterSpeed]](dict)
        self._row_samples: deque[float] = deque(maxlen=PROMPT_SAMPLES)

    def note_prompt(
        self, prompt: RoundTrip, slowest: float, single: RoundTrip, stages: int
    ) -> None:
        """Estimate ``row_seconds`` from the round trips of a prompt and a ``single`` row after it.

        ``slowest``: seconds of the slowest pass over the prompt's last chunk. Both trips cross the
        links of ``stages`` stages at the same latency, so the difference, less the stages' compute,
        is the time that the prompt's rows occupied the links. The chunks follow each other at the
        pace of the slower of link and stage.
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
