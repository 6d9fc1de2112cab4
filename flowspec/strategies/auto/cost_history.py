"""Measured costs of one pipeline's passes and links, kept from job to job.

These costs do not depend on the prompt, and a job of fifty tokens ends before it has measured them
itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from flowspec.core.job.pass_times import PassTimes
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.segments import prefill_chunks
from flowspec.strategies.auto.drafter_bandit import DrafterSpeed

#: Most recent prompts whose round trips count.
PROMPT_SAMPLES = 8
#: Passes of the drafter over which ``reach`` is averaged.
REACH_PASSES = 16
#: Least rows of a prompt whose round trip is used to measure a link's seconds per row.
PROMPT_ROWS = 8


class CostHistory:
    """Measured costs of one pipeline, as far as they are known.

    Where jobs share links, each job attributes the others' time there to its own rows.
    """

    def __init__(self) -> None:
        #: Those of the pipeline, whichever strategy measured them.
        self.passes = PassTimes()
        #: Tokens per second of the job that decoded last; 0: there was none.
        self.rate = 0.0
        #: Probability that the target chooses the best candidate of a drafted node, averaged over
        #: recent nodes by how likely they were to be needed.
        self.reach = 1.0
        #: Seconds that one row occupies a link between two stages; 0: unknown or negligible.
        self.row_seconds = 0.0
        #: Speeds by choice, kept apart by a job's (coupled, sampled, without a bound).
        self.speeds = defaultdict[tuple[bool, bool, bool], dict[int, DrafterSpeed]](dict)
        self._row_samples: deque[float] = deque(maxlen=PROMPT_SAMPLES)

    def note_reach(self, reach: float) -> None:
        """Learn from a pass of the drafter over nodes whose mean is ``reach``."""
        self.reach += (reach - self.reach) / REACH_PASSES

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
