"""How long a comparison takes, told before it is run."""

from __future__ import annotations

from dataclasses import dataclass

#: Measured once on two cores, in seconds: both pipelines to start and stop; a pass of all stages
#: without latency, on the slower side; a run outside decoding, on average over both sides.
PIPELINES = 20.0
PASS = 0.015
RUN = 1.0
#: Round trips of one stage in a run outside decoding, mostly to load the model.
LOADING_TRIPS = 20.0


@dataclass(frozen=True, slots=True)
class Extent:
    """What is run at each latency: ``settings`` of either side on the ``tuning`` prompts once, then
    ``finalists`` of either side on the ``measured`` prompts, ``repeats`` times.
    """

    stages: int
    settings: int
    tuning: int
    finalists: int
    measured: int
    repeats: int
    tokens: int

    @property
    def runs(self) -> int:
        """Runs of both sides at one latency."""
        return 2 * (self.settings * self.tuning + self.finalists * self.measured * self.repeats)

    def seconds(self, latency: float) -> float:
        """Roughly how long one latency, in seconds each way, takes: as if nothing were drafted."""
        trip = 2 * self.stages * latency
        return PIPELINES + self.runs * (RUN + LOADING_TRIPS * trip + self.tokens * (PASS + trip))
