"""How long a comparison takes, told before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds until both pipelines have started, and to stop them.
PIPELINES = 20.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What a run of one side takes: ``run`` seconds and ``trips`` round trips through all stages
    outside decoding; ``token`` seconds and ``token_trips`` of them per token, over its settings.
    """

    run: float
    trips: float
    token: float
    token_trips: float

    def seconds(self, tokens: int, trip: float) -> float:
        """One run, with ``trip`` seconds of latency per round trip."""
        return self.run + self.trips * trip + tokens * (self.token + self.token_trips * trip)


#: Seen once on two cores. llama.cpp loads the model over the links in every run.
OURS = Pace(run=0.1, trips=2.0, token=0.020, token_trips=0.7)
THEIRS = Pace(run=0.3, trips=60.0, token=0.006, token_trips=0.9)


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
        """Runs of either side at one latency."""
        return self.settings * self.tuning + self.finalists * self.measured * self.repeats

    def seconds(self, latency: float) -> float:
        """Roughly how long one latency, in seconds each way, takes."""
        trip = 2 * self.stages * latency
        return PIPELINES + self.runs * sum(
            pace.seconds(self.tokens, trip) for pace in (OURS, THEIRS)
        )

    def texts_seconds(self) -> float:
        """Roughly how long the target's own texts take, without latency."""
        return PIPELINES + (self.tuning + self.measured) * OURS.seconds(self.tokens, 0.0)

    def told(self, latencies: Sequence[float]) -> str:
        """All of it in one line; ``latencies`` in milliseconds each way."""
        minutes = {latency: self.seconds(latency / 1e3) / 60 for latency in latencies}
        each = ", ".join(f"{taken:.0f} at {latency:g} ms" for latency, taken in minutes.items())
        return (
            f"About {sum(minutes.values()) + self.texts_seconds() / 60:.0f} minutes ({each}): "
            f"{self.runs} runs of {self.tokens} tokens of either side at each latency"
        )
