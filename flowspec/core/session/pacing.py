"""Pacing: when a run's segments may leave, when its answers are judged, what a join does.

A strategy names one of three policies. ``FreeRunning``: an answer is judged when it arrives, and a
segment leaves when a slot is free. ``Lockstep``, FlowSpec's barrier: stage k computes segment i of
a round in step i + k - 1, and a step s >= N starts only after the verdict of step s - N
(docs/algorithms.md#lockstep). ``Timestep``, PipeDec's barrier: every active stage group and the
drafter compute once, a join of the task graph waits for all of them, and the next timestep starts
after the draft worker's verdict (docs/algorithms.md#timesteps). The task graph does the waiting: it
holds a hop's envelope until the verdict's task is complete.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Hop


class TurnCause(enum.Enum):
    """The event that a session's turn follows."""

    ANSWER = "answer"  #: the target answered a segment
    MIDDLE_ANSWER = "middle answer"  #: a middle model answered a segment
    DRAFTED = "drafted"  #: the drafter's pass ended
    JOIN = "join"  #: all tasks of a join are complete


@dataclass(frozen=True, slots=True)
class Route:
    """A segment's tasks on its way through the stages.

    ``first``: the graph task of its delivery to the first stage; None: it is delivered at once.
    ``task``: the task that its first pass completes, if not ``first``'s. ``rest``: the hops after
    the first stage. ``marker``: it is forwarded even when a prune has emptied it.
    """

    first: Hop | None = None
    task: str = ""
    rest: tuple[Hop, ...] = ()
    marker: bool = False


#: The route of a segment that waits for no task.
DELIVERED = Route()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What a turn hands to the task graph: the tasks it completes, and the join to add."""

    completes: tuple[str, ...] = ()
    join: Hop | None = None


NOTHING = TurnEnd()


class Pacing:
    """One run's pacing policy; the defaults are those of free running."""

    #: Segments that a prune has emptied still travel, so that steps are counted correctly.
    keeps_emptied = False
    #: The strategy's idle growth is asked for once per verdict that accepts nothing
    #: (``expansion_pending``), instead of whenever the session is idle.
    expands_on_empty_verdict = False
    #: A barrier decides what leaves when, and not the run's share of the pipeline.
    has_barrier = False

    def may_judge(self, cause: TurnCause, *, decoding: bool) -> bool:
        """Whether the answers received so far are judged in this turn."""
        return cause is TurnCause.ANSWER

    def begin_judging(self, cause: TurnCause, *, of_segment: bool) -> tuple[str, ...]:
        """Called before answers are judged; returns the tasks that this completes.

        ``of_segment``: the answer was to a segment in flight, not to prompt rows or void ones.
        """
        return ()

    def start_round(self, number: int, slots: int) -> tuple[str, ...]:
        """Round ``number`` begins with ``slots`` slots; the tasks to complete.

        They release every envelope of the previous round that the task graph still holds.
        """
        return ()

    def begin_turn(self, cause: TurnCause, *, decoding: bool) -> None:
        """Called after judging: next the tree is grown and segments are sent."""

    def has_slot(self, in_flight: int, slots: int) -> bool:
        """Whether one more segment may leave while ``in_flight`` of ``slots`` are in flight."""
        return in_flight < slots

    def follow_empty_verdict(self) -> None:
        """An answer was judged, and nothing follows from it."""

    @property
    def expansion_pending(self) -> bool:
        """Whether an empty verdict is still to be followed by an idle growth."""
        return False

    def begin_growth(self, *, idle: bool) -> None:
        """A growth begins: on an empty verdict if ``idle``, else on one that moved the root."""

    def bubbles_due(self, *, growing: bool) -> int:
        """The number of empty segments that must leave now, if none waits to be sent.

        ``growing``: a growth is under way.
        """
        return 0

    def route(self) -> Route:
        """The route of the next segment."""
        return DELIVERED

    def sent(self, segment: int) -> None:
        """The segment has left on the route returned last."""

    def end_turn(self, in_flight: Iterable[int], needs_drafter: Callable[[], bool]) -> TurnEnd:
        """Called at the turn's end.

        ``needs_drafter()`` proceeds with the growth and returns whether it needs the drafter.
        """
        return NOTHING


class FreeRunning(Pacing):
    """No segment waits for a verdict."""


class Lockstep(Pacing):
    """FlowSpec's barrier, for a pipeline of ``stages``.

    Every judged answer makes one segment due. Due segments leave in the order of the answers: each
    is cut from the growth that follows its verdict, or is a bubble. An empty verdict's growth, the
    score-aware expansion, waits until the growth before it is complete. A verdict that moves the
    root drops the expansions that have not begun.
    """

    keeps_emptied = True
    expands_on_empty_verdict = True
    has_barrier = True

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._round = 0
        self._sent = 0
        self._judged = 0
        self._due = 0  # segments that must leave before the next answer
        self._pending = 0  # expansions that have not begun; each will fill one due segment

    def begin_judging(self, cause: TurnCause, *, of_segment: bool) -> tuple[str, ...]:
        if not of_segment:
            return ()
        self._due += 1
        self._judged += 1
        return (self._verdict(self._judged - 1),)

    def start_round(self, number: int, slots: int) -> tuple[str, ...]:
        # A hop of the last segment sent waits for the verdict of at most step sent - 2.
        last = max(self._judged, self._sent - 1)
        held = tuple(self._verdict(step) for step in range(self._judged, last))
        self._round = number
        self._sent = 0
        self._judged = 0
        self._due = slots
        self._pending = 0
        return held

    def has_slot(self, in_flight: int, slots: int) -> bool:
        return self._due > 0

    def follow_empty_verdict(self) -> None:
        self._pending += 1

    @property
    def expansion_pending(self) -> bool:
        return self._pending > 0

    def begin_growth(self, *, idle: bool) -> None:
        self._pending = self._pending - 1 if idle else 0

    def bubbles_due(self, *, growing: bool) -> int:
        if growing and not self._sent:
            return 0  # a round's first growth fills all its slots
        return max(0, self._due - self._pending - growing)

    def route(self) -> Route:
        index = self._sent
        self._sent += 1
        first, *rest = (
            Hop(f"{self._round}/{index}/{stage}", self._after(index + stage - 1))
            for stage in range(1, self._stages + 1)
        )
        return Route(first, rest=tuple(rest), marker=True)

    def sent(self, segment: int) -> None:
        self._due = max(0, self._due - 1)

    def _after(self, step: int) -> tuple[str, ...]:
        return (self._verdict(step - self._stages),) if step >= self._stages else ()

    def _verdict(self, step: int) -> str:
        return f"{self._round}/verdict/{step}"


class Timestep(Pacing):
    """PipeDec's timesteps over ``groups`` stage groups, contiguous and near-equal.

    The stages of a group compute one after another within one timestep. Tasks are PipeDec's tuples:
    ``decode/NODE/t`` (node 0 is the drafter), ``sync/t`` and ``verdict/t``. One segment may leave
    at the beginning of a timestep: after the first token, and after every join.
    """

    has_barrier = True

    def __init__(self, stages: int, groups: int) -> None:
        self.now = 0  # the timestep
        bounds = [stages * group // groups for group in range(groups + 1)]
        self._groups = [range(first + 1, end + 1) for first, end in itertools.pairwise(bounds)]
        self._born: dict[int, int] = {}  # segment -> the timestep it enters the first group
        self._beginning = False  # a timestep begins with this turn
        self._slot = False
        self._waits_for_drafter = False  # whether the current join does

    def may_judge(self, cause: TurnCause, *, decoding: bool) -> bool:
        return cause is TurnCause.JOIN or (cause is TurnCause.ANSWER and not decoding)

    def begin_judging(self, cause: TurnCause, *, of_segment: bool) -> tuple[str, ...]:
        return (f"verdict/{self.now}",) if cause is TurnCause.JOIN else ()

    def begin_turn(self, cause: TurnCause, *, decoding: bool) -> None:
        self._beginning = cause is TurnCause.JOIN or (decoding and not self.now)
        self._slot = self._beginning

    def has_slot(self, in_flight: int, slots: int) -> bool:
        return self._slot

    def route(self) -> Route:
        """The first group's stages in the next timestep, the second group's in the one after."""
        begin = self.now + 1
        first, *rest = (
            Hop(
                f"decode/{stage}/{begin + group}",
                (f"verdict/{begin + group - 1}",) if group and stage == stages[0] else (),
            )
            for group, stages in enumerate(self._groups)
            for stage in stages
        )
        return Route(first, task=first.task, rest=tuple(rest))

    def sent(self, segment: int) -> None:
        self._born[segment] = self.now + 1
        self._slot = False

    def end_turn(self, in_flight: Iterable[int], needs_drafter: Callable[[], bool]) -> TurnEnd:
        if self._beginning:
            self._beginning = False
            self._slot = False
            self._waits_for_drafter = needs_drafter()
            return TurnEnd(join=self._begin_timestep(in_flight))
        if self._waits_for_drafter and not needs_drafter():
            self._waits_for_drafter = False
            return TurnEnd(completes=(self._drafter_task,))
        return NOTHING

    def _begin_timestep(self, in_flight: Iterable[int]) -> Hop:
        """The next timestep's join with the tasks it waits for."""
        self.now += 1
        alive = set(in_flight)
        self._born = {segment: born for segment, born in self._born.items() if segment in alive}
        active = [self._drafter_task] if self._waits_for_drafter else []
        for born in self._born.values():
            active += self._tasks_of(self.now - born)
        return Hop(f"sync/{self.now}", tuple(active))

    def _tasks_of(self, group: int) -> Sequence[str]:
        if group >= len(self._groups):
            return ()
        return [f"decode/{stage}/{self.now}" for stage in self._groups[group]]

    @property
    def _drafter_task(self) -> str:
        """The drafter's own task in this timestep."""
        return f"decode/0/{self.now}"
