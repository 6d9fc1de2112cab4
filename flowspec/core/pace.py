"""How segments are paced through the stages: freely, or in the papers' lockstep.

In lockstep stage k computes segment i of a round in step i + k - 1, and a step s >= N starts only after
the verdict of step s - N (FlowSpec section 3.3; ``algorithms.md`` 2.5). The waiting is done by the task
graph: a hop's envelope is held until the verdict's task is complete.
"""

from __future__ import annotations

from typing import Protocol

from flowspec.core.messages import Hop


class Pace(Protocol):
    """One job's pacing."""

    #: Segments emptied by a prune still travel, to keep the count of steps.
    markers: bool

    def start_round(self, number: int) -> tuple[str, ...]:
        """A new round begins; tasks to complete so that nothing of the old one is held for ever."""
        ...

    def hops(self) -> tuple[Hop, ...]:
        """The hops of the next segment, one per stage; empty: each is delivered at once."""
        ...

    def answered(self) -> tuple[str, ...]:
        """Tasks completed by judging the next answer of this round."""
        ...


class Free:
    """Nobody waits for a verdict."""

    markers = False

    def start_round(self, number: int) -> tuple[str, ...]:
        return ()

    def hops(self) -> tuple[Hop, ...]:
        return ()

    def answered(self) -> tuple[str, ...]:
        return ()


class Lockstep:
    """The barrier of the papers, for a pipeline of ``stages``."""

    markers = True

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._round = 0
        self._sent = 0
        self._judged = 0

    def start_round(self, number: int) -> tuple[str, ...]:
        # A hop of the last segment sent waits for the verdict of at most step sent - 2.
        held = tuple(self._verdict(step) for step in range(self._judged, max(self._judged, self._sent - 1)))
        self._round, self._sent, self._judged = number, 0, 0
        return held

    def hops(self) -> tuple[Hop, ...]:
        index = self._sent
        self._sent += 1
        return tuple(
            Hop(f"{self._round}/{index}/{stage}", self._after(index + stage - 1))
            for stage in range(1, self._stages + 1)
        )

    def answered(self) -> tuple[str, ...]:
        self._judged += 1
        return (self._verdict(self._judged - 1),)

    def _after(self, step: int) -> tuple[str, ...]:
        return (self._verdict(step - self._stages),) if step >= self._stages else ()

    def _verdict(self, step: int) -> str:
        return f"{self._round}/verdict/{step}"
