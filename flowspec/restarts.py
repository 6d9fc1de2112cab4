"""When a process that has stopped is started again: with back-off, and not without end."""

from __future__ import annotations

from collections import deque

#: Seconds before a process is started again, after the first stop, the second ...; then the last.
BACK_OFF = (0.0, 1.0, 2.0, 4.0, 8.0)
#: Most starts of one process within so many seconds.
MOST = 5
WITHIN_SECONDS = 300.0


class Restarts:
    """The restarts of one process; ``now`` is in seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._stops: deque[float] = deque()
        self._due: float | None = None

    def stopped(self, now: float) -> bool:
        """Note that the process has stopped; whether it may be started again."""
        while self._stops and now - self._stops[0] > WITHIN_SECONDS:
            self._stops.popleft()
        if len(self._stops) >= MOST:
            return False
        self._due = now + BACK_OFF[min(len(self._stops), len(BACK_OFF) - 1)]
        self._stops.append(now)
        return True

    @property
    def waits(self) -> bool:
        """Whether the process is to be started again."""
        return self._due is not None

    def is_due(self, now: float) -> bool:
        """Whether it is to be started now."""
        return self._due is not None and now >= self._due

    def started(self) -> None:
        """Note that it was started."""
        self._due = None
