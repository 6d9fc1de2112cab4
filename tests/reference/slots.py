"""Slots of a free-running pipeline."""

from __future__ import annotations

from tests.reference.engine import Decoder, Segment
from tests.reference.tree import Node, live


class Slots:
    """At most ``count`` segments are in flight.

    A slot frees when the answer comes, or when a verdict leaves its segment without live rows.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: list[Segment] = []

    @property
    def free(self) -> bool:
        return len(self._taken) < self._count

    def take(self, segment: Segment) -> None:
        self._taken.append(segment)

    def answered(self, segment: Segment) -> None:
        if segment in self._taken:
            self._taken.remove(segment)

    def prune(self, root: Node) -> None:
        self._taken = [segment for segment in self._taken if live(segment.rows, root)]

    def clear(self) -> None:
        self._taken = []


class FreeRunning(Decoder):
    """A decoder whose segments leave as slots are free; a system says how many there are."""

    _slots: Slots

    def answer_came(self, segment: Segment) -> None:
        self._slots.answered(segment)

    def send_what_waits(self) -> None:
        while self.waiting and self._slots.free:
            self._slots.take(self.send(self.waiting.pop(0)))
