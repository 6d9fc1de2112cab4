"""Segments on their way through the stages, the answers that came back, and how long the way is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowspec.core.messages import Result
from flowspec.errors import StateError

#: Samples of travel times remembered.
SAMPLES = 32

Top = Sequence[tuple[int, float]]


@dataclass(slots=True)
class Flight:
    """A segment on its way; ``live`` are its rows no prune has reached."""

    live: set[int]
    sent_at: float


class Flights:
    """What was sent of the tree and lives: in flight, or answered and not judged."""

    def __init__(self, root: int) -> None:
        self.sent: set[int] = {root}
        self.answers: dict[int, int] = {}  # node -> the target's token after it
        self.tops: dict[int, Top] = {}
        self._flights: dict[int, Flight] = {}
        self._trips: deque[float] = deque(maxlen=SAMPLES)
        self._gaps: deque[float] = deque(maxlen=SAMPLES)
        self._landed_at: float | None = None  # the last answer, if others were on their way behind it

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def loaded(self) -> list[int]:
        """Segments with live rows."""
        return [number for number, flight in self._flights.items() if flight.live]

    @property
    def covering(self) -> int:
        """Segments in flight that hide the way there and back: shortest trip over shortest gap between
        answers, the bandwidth-delay product in segments, plus the one being computed; 0: not known."""
        if not self._trips or not self._gaps or min(self._gaps) <= 0:
            return 0
        return math.ceil(min(self._trips) / min(self._gaps)) + 1

    def launch(self, number: int, ids: Sequence[int], now: float) -> None:
        """Segment ``number`` leaves."""
        self._flights[number] = Flight(set(ids), now)
        self.sent.update(ids)

    def land(self, result: Result, now: float) -> bool:
        """Take an answer in; whether its segment was counted as in flight."""
        flight = self._flights.pop(result.segment, None)
        if flight is not None:
            if not flight.live <= set(result.ids):
                raise StateError(f"segment {result.segment} came back without rows that are still live")
            self._time(flight, now)
        for at, (node, token) in enumerate(zip(result.ids, result.tokens, strict=True)):
            if node in self.sent:
                self.answers[node] = token
                if result.top:
                    self.tops[node] = result.top[at]
        return flight is not None

    def _time(self, flight: Flight, now: float) -> None:
        self._trips.append(now - flight.sent_at)
        if self._landed_at is not None and now > self._landed_at:
            self._gaps.append(now - self._landed_at)
        self._landed_at = now if self._flights else None

    def keep(self, nodes: Collection[int], *, emptied: bool) -> None:
        """A prune has left ``nodes``; flights without live rows go, unless ``emptied`` ones still count."""
        self.sent &= set(nodes)
        self.answers = {node: token for node, token in self.answers.items() if node in nodes}
        self.tops = {node: top for node, top in self.tops.items() if node in nodes}
        for flight in self._flights.values():
            flight.live &= self.sent
        if not emptied:
            self._flights = {number: flight for number, flight in self._flights.items() if flight.live}

    def clear(self) -> None:
        """Nothing that was sent lives."""
        self._flights.clear()
        self.answers.clear()
        self.tops.clear()
        self.sent.clear()
        self._landed_at = None
