"""The lease on a role, as its holder sees it by its own clock.

    state      ask    granted          granted, other generation    refused
    FREE       -      HELD             HELD                         LOST
    HELD       -      HELD, younger    LOST                         LOST
    LOST       -      -                -                            -

A lease counts from the moment at which the request that was granted was sent: the broker counts
from a later one, so the holder's lease ends first. The holder looks at its age before every write
(``may_write``), whatever becomes of the request that is under way. A late renewal is not a loss: as
long as nobody else has claimed the role, the generation stays, and the holder goes on.

``HangWatch`` says when a worker's loop has been at one thing for so long that it counts as lost.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Lifetimes in ms: the shortest, the longest on a busy machine, and one while a worker loads.

    ``renew_seconds``: between two renewals.
    """

    shortest_ms: int = 5_000
    longest_ms: int = 30_000
    loading_ms: int = 30_000
    renew_seconds: float = 1.0


#: The terms of every role.
TERMS = LeaseTerms()
#: Lifetime of a lease relative to the longest recent interval between two renewals.
MARGIN = 4.0
#: Number of recent intervals.
REMEMBERED = 30
#: The share of its lifetime in which a holder may write: a write takes a moment to arrive.
WRITING_SHARE = 0.8
#: A loop hangs that is at one thing for longer than this, seconds. A pass may take so many times
#: the longest one before it; the first so many times what a lone row took for each of its rows, up
#: to a limit.
HUNG_SECONDS = 45.0
HUNG_TIMES = 10.0
#: Of a lone row where none was tried.
ROW_SECONDS = 0.1
FIRST_SECONDS = 300.0


class Doing(NamedTuple):
    """The ``number``-th thing that a loop does, and the seconds that it may take.

    0: the loop has not begun.
    """

    number: int = 0
    most: float = HUNG_SECONDS


def most_of_pass(longest: float, rows: int, row: float = ROW_SECONDS) -> float:
    """Seconds that a pass over ``rows`` may take; ``longest``: those of the longest one before.

    ``row``: of a lone row before the first pass.
    """
    expected = HUNG_TIMES * longest if longest else min(HUNG_TIMES * row * rows, FIRST_SECONDS)
    return max(HUNG_SECONDS, expected)


class LeaseState(enum.Enum):
    """See the module's docstring."""

    FREE = "free"
    HELD = "held"
    LOST = "lost"


class LeaseMachine:
    """One holder's lease; ``now`` is in seconds on its own monotonic clock.

    ``generation``: of the role under this holder; 0 before it is held.
    """

    def __init__(self, terms: LeaseTerms = TERMS) -> None:
        self.state = LeaseState.FREE
        self.generation = 0
        self._terms = terms
        self._asked_at = 0.0
        self._lifetime = 0.0  # seconds, of the request that was sent last
        self._granted_at: float | None = None  # when the request was sent that was granted last
        self._writes_until = 0.0
        self._intervals: deque[float] = deque(maxlen=REMEMBERED)

    def ask(self, now: float, *, loading: bool = False, load: float = 0.0) -> int:
        """A request is sent now; the lifetime to ask for, ms.

        ``loading``: the worker reads weights, which may starve it. ``load``: the machine's load per
        core: a starved but healthy worker keeps its role.
        """
        if self._granted_at is not None:
            self._intervals.append(now - self._granted_at)
        terms = self._terms
        by_load = terms.shortest_ms * load
        by_intervals = MARGIN * 1000 * max(self._intervals, default=0.0)
        wanted = max(terms.shortest_ms, min(terms.longest_ms, max(by_load, by_intervals)))
        lifetime = max(wanted, terms.loading_ms) if loading else wanted
        self._asked_at = now
        self._lifetime = lifetime / 1000
        return int(lifetime)

    def granted(self, generation: int) -> None:
        """The request sent last was granted under ``generation``."""
        if self.state is LeaseState.LOST:
            return
        if self.state is LeaseState.HELD and generation != self.generation:
            self.state = LeaseState.LOST
            return
        self.state = LeaseState.HELD
        self.generation = generation
        self._granted_at = self._asked_at
        self._writes_until = self._asked_at + self._lifetime * WRITING_SHARE

    def refused(self) -> None:
        """Another worker holds the role."""
        self.state = LeaseState.LOST

    def late_by(self, now: float) -> float:
        """Seconds since the last request that was granted, beyond the lifetime; at most 0: none."""
        granted = self._granted_at
        return 0.0 if granted is None else now - granted - self._lifetime

    def may_write(self, now: float) -> bool:
        """Whether the lease is young enough for a write to be the holder's."""
        return self.state is LeaseState.HELD and now < self._writes_until


class HangWatch:
    """Whether a loop hangs, from looks at it; a pause of the whole process does not count.

    ``most_between``: longest time between two looks that counts, seconds.
    """

    def __init__(self, most_between: float = 2 * TERMS.renew_seconds) -> None:
        self._most_between = most_between
        self._looked_at = 0.0
        self._number = 0  # of what the loop did at the last look
        self.age = 0.0  # for how long it has done that, seconds

    def look(self, doing: Doing, now: float) -> bool:
        """Whether the loop has been at what it does for longer than that may take."""
        between = min(now - self._looked_at, self._most_between)
        same = doing.number and doing.number == self._number
        self.age = self.age + between if same else 0.0
        self._looked_at = now
        self._number = doing.number
        return self.age > doing.most
