"""How many answers may be under way at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from flowspec.gateway.errors import busy, refused

#: Answers whose duration says when a client may try again.
_REMEMBERED = 32
#: Shortest and longest time after which a client is asked to try again, seconds.
SOONEST, LATEST = 1, 60


class Capacity:
    """Counts the answers under way; ``most`` of them may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self.open = 0

    @property
    def retry_seconds(self) -> int:
        """After how many seconds a place should be free: as long as a recent answer took."""
        if not self._durations:
            return SOONEST
        mean = sum(self._durations) / len(self._durations)
        return min(LATEST, max(SOONEST, math.ceil(mean)))

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Take ``count`` places until the ``with`` ends; an error if they are not free."""
        if count > self._most:
            raise refused(f"{count} answers are asked for, and at most {self._most} may be")
        if self.open + count > self._most:
            raise busy(
                f"{self.open} answers are under way and at most {self._most} may be; "
                "try again later",
                self.retry_seconds,
            )
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    def note(self, seconds: float) -> None:
        """Note how long an answer took."""
        self._durations.append(seconds)
