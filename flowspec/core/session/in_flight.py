"""The in-flight window: segments that wait to be sent, and segments that were sent.

A node's status is kept by the tree alone (``core.tree.tree.Status``); this module keeps the
segments that nodes were put into. A segment is emptied when a prune removes its last live node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Answer
from flowspec.core.session.bandwidth_delay import BandwidthDelay
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.tree import Tree
from flowspec.errors import ProtocolError


@dataclass(slots=True)
class InFlightSegment:
    """A segment of ``rows`` rows, sent and not answered.

    ``live``: its nodes that are not pruned. ``alone``: no other segment was in flight when it was
    sent.
    """

    live: set[int]
    sent_at: float
    alone: bool
    rows: int

    def round_trip(self, now: float) -> RoundTrip:
        """The segment's round trip, if its answer arrives ``now``."""
        return RoundTrip(self.rows, now - self.sent_at, self.alone)


class InFlightWindow:
    """Segments of one run between the growth that cut them and their answers."""

    def __init__(self) -> None:
        self.bandwidth_delay = BandwidthDelay()
        self._waiting: deque[list[int]] = deque()
        self._in_flight: dict[int, InFlightSegment] = {}

    def __len__(self) -> int:
        """The number of segments in flight; in lockstep it includes emptied ones."""
        return len(self._in_flight)

    @property
    def loaded(self) -> list[int]:
        """Segments in flight that have live rows."""
        return [number for number, segment in self._in_flight.items() if segment.live]

    @property
    def waiting(self) -> int:
        """The number of segments cut and not sent."""
        return len(self._waiting)

    def enqueue(self, nodes: list[int]) -> None:
        """Append a segment of ``nodes``, which are WAITING in the tree, to those to be sent."""
        self._waiting.append(nodes)

    def has_waiting(self, node: int) -> bool:
        """Whether ``node`` is in a segment that waits to be sent."""
        return any(node in segment for segment in self._waiting)

    @property
    def first_waiting(self) -> list[int] | None:
        """The next segment to send."""
        return self._waiting[0] if self._waiting else None

    def dequeue(self) -> list[int]:
        """Remove and return the next segment to send."""
        return self._waiting.popleft()

    def launch(self, number: int, nodes: Sequence[int], now: float) -> None:
        """Segment ``number`` leaves with ``nodes``."""
        self._in_flight[number] = InFlightSegment(set(nodes), now, not self._in_flight, len(nodes))

    def land(self, answer: Answer, now: float) -> InFlightSegment | None:
        """Remove an answered segment and return it; None: prompt rows, or emptied by a prune.

        ProtocolError if the answer lacks rows that are still live.
        """
        segment = self._in_flight.pop(answer.segment, None)
        if segment is not None:
            if not segment.live <= set(answer.ids):
                raise ProtocolError(
                    f"segment {answer.segment} came back without rows that are still live"
                )
            trip = segment.round_trip(now)
            self.bandwidth_delay.note(trip, answer.seconds, len(self._in_flight), now)
        return segment

    def prune(self, tree: Tree, *, keep_emptied: bool) -> None:
        """Drop the nodes that are not in ``tree``, and segments without nodes unless kept."""
        for segment in self._in_flight.values():
            segment.live &= tree.sent
        if not keep_emptied:
            self._in_flight = {
                number: segment for number, segment in self._in_flight.items() if segment.live
            }
            if not self._in_flight:
                self.bandwidth_delay.emptied()
        waiting = ([node for node in segment if node in tree] for segment in self._waiting)
        self._waiting = deque(segment for segment in waiting if segment)

    def clear(self) -> None:
        """Drop all segments."""
        self._in_flight.clear()
        self._waiting.clear()
        self.bandwidth_delay.emptied()
