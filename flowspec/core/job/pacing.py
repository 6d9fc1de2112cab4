"""How segments are paced through the stages: freely, in FlowSpec's lockstep, or in PipeDec's
timesteps.

In lockstep stage k computes segment i of a round in step i + k - 1, and a step s >= N starts
only after the verdict of step s - N (FlowSpec section 3.3; ``algorithms.md`` 2.5). In timesteps
every active stage group and the drafter compute once, a join of the task graph waits for all of
them, and the next timestep starts after the draft worker's verdict (PipeDec; ``algorithms.md``
3.3, 3.6). The waiting is done by the task graph: a hop's envelope is held until the verdict's
task is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from flowspec.core.protocol.messages import Hop


class Pacing(Protocol):
    """One job's pacing."""

    #: Segments emptied by a prune still travel, to keep the count of steps.
    markers: bool
    #: Answers are judged, and segments sent, only where a timestep ends.
    barrier: bool

    def start_round(self, number: int) -> tuple[str, ...]:
        """A new round begins; tasks to complete so that nothing of the old one is held for ever."""
        ...

    def hops(self) -> tuple[Hop, ...]:
        """The hops of the next segment, one per stage; empty: each is delivered at once."""
        ...

    def answered(self) -> tuple[str, ...]:
        """Tasks completed by judging the next answer of this round."""
        ...


class FreeRunning:
    """Nobody waits for a verdict."""

    markers = False
    barrier = False

    def start_round(self, number: int) -> tuple[str, ...]:
        return ()

    def hops(self) -> tuple[Hop, ...]:
        return ()

    def answered(self) -> tuple[str, ...]:
        return ()


class Lockstep:
    """FlowSpec's barrier, for a pipeline of ``stages``."""

    markers = True
    barrier = False

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._round = 0
        self._sent = 0
        self._judged = 0

    def start_round(self, number: int) -> tuple[str, ...]:
        # A hop of the last segment sent waits for the verdict of at most step sent - 2.
        held = tuple(
            self._verdict(step) for step in range(self._judged, max(self._judged, self._sent - 1))
        )
        self._round = number
        self._sent = 0
        self._judged = 0
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


class Timestep:
    """PipeDec's timesteps over ``groups`` stage groups, contiguous and near-equal.

    The stages of a group follow each other within one timestep. Tasks are PipeDec's tuples:
    ``decode/NODE/t`` (node 0 is the drafter), ``sync/t`` and ``verdict/t``.
    """

    markers = False
    barrier = True

    def __init__(self, stages: int, groups: int) -> None:
        self.now = 0  # the timestep
        bounds = [stages * group // groups for group in range(groups + 1)]
        self._groups = [range(first + 1, end + 1) for first, end in itertools.pairwise(bounds)]
        self._born: dict[int, int] = {}  # segment -> the timestep it enters the first group

    def start_round(self, number: int) -> tuple[str, ...]:
        return ()

    def answered(self) -> tuple[str, ...]:
        return ()

    def hops(self) -> tuple[Hop, ...]:
        """Hops of the segment that enters the first group in the coming timestep."""
        first = self.now + 1
        return tuple(
            Hop(
                f"decode/{stage}/{first + group}",
                (f"verdict/{first + group - 1}",) if group and stage == stages[0] else (),
            )
            for group, stages in enumerate(self._groups)
            for stage in stages
        )

    def entered(self, segment: int) -> None:
        """``segment`` was sent over the hops named last."""
        self._born[segment] = self.now + 1

    def advance(self, flights: Iterable[int], *, drafting: bool) -> tuple[str, Sequence[str]]:
        """The next timestep begins with ``flights`` on their way: its join, and what the join waits
        for.
        """
        self.now += 1
        alive = set(flights)
        self._born = {segment: born for segment, born in self._born.items() if segment in alive}
        active = [f"decode/0/{self.now}"] if drafting else []
        for born in self._born.values():
            if self.now - born < len(self._groups):
                active += [f"decode/{stage}/{self.now}" for stage in self._groups[self.now - born]]
        return f"sync/{self.now}", active

    @property
    def drafted(self) -> str:
        """The drafter's own task in this timestep."""
        return f"decode/0/{self.now}"

    @property
    def verdict(self) -> str:
        """The task that ends this timestep."""
        return f"verdict/{self.now}"
