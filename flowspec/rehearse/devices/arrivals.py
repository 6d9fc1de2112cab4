"""Arrival times of messages at a worker, from their stamps."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.rehearse.devices.links import DirectedLinks, Leg


@dataclass(slots=True, eq=False)
class Parcel:
    """An entry to a worker, one message or a bundle, that is at ``stamp``'s box at its time.

    ``software``: CPU seconds of reading it. ``arrives``: when it is at the worker's box; None while
    that is not known.
    """

    stamp: Stamp
    entry: tuple[Envelope, ...]
    software: float = 0.0
    arrives: float | None = None


@dataclass(slots=True)
class _Channel:
    """A sender's entries of one run: those that have not been delivered, and the last's time."""

    waiting: deque[Parcel]
    last: float = 0.0


class Arrivals:
    """Arrival times at ``node``, which charges the last link of every message that it gets.

    ``hop``: seconds of software charged after it, within a box, too.
    A sender's messages of one run arrive in the order they were sent, the task graph's in the order
    of release: one that overtakes another, on a shorter way, is held until that one has arrived.
    A bundle arrives as a whole, once it is due for all its runs.
    The graph's order is that of the calls that release: a message released by a completion that is
    long on its way to the broker holds back those that are released after that call.
    """

    def __init__(self, node: Address, links: DirectedLinks, hop: float = 0.0) -> None:
        self._node = node
        self._hop = hop
        self._links = links
        self._channels: defaultdict[tuple[RunKey, Address], _Channel] = defaultdict(
            lambda: _Channel(deque())
        )

    def expect(self, parcel: Parcel) -> None:
        """Give ``parcel`` its place in its sender's order; call in the order they were sent."""
        for channel in self._channels_of(parcel):
            channel.waiting.append(parcel)

    def is_here(self, parcel: Parcel) -> bool:
        """Whether ``parcel`` has no link to take any more."""
        return parcel.stamp.source == self._node

    def enter(self, parcel: Parcel) -> list[tuple[float, Parcel]]:
        """Let ``parcel`` take its last link; return when which parcels arrive, as known now.

        Call in the order of the parcels' stamps, for those from one box. A sender's parcels are
        returned in their order.
        """
        stamp = parcel.stamp
        leg = Leg(stamp.source, self._node)
        at = self._links.arrival(leg, self._node, parcel.entry, stamp.at)
        parcel.arrives = at + self._hop
        known: list[tuple[float, Parcel]] = []
        moved = deque(self._channels_of(parcel))
        while moved:
            waiting = moved.popleft().waiting
            while waiting and (arrived := self._deliver(waiting[0])) is not None:
                known.append(arrived)
                moved += self._channels_of(arrived[1])
        return known

    def _deliver(self, parcel: Parcel) -> tuple[float, Parcel] | None:
        """Take ``parcel`` out of its channels if it is the next one of all; when it arrives."""
        channels = self._channels_of(parcel)
        if parcel.arrives is None or any(one.waiting[0] is not parcel for one in channels):
            return None
        at = max(parcel.arrives, *(channel.last for channel in channels))
        for channel in channels:
            channel.waiting.popleft()
            channel.last = at
        return at, parcel

    def _channels_of(self, parcel: Parcel) -> list[_Channel]:
        return [self._channels[envelope.message.run, envelope.sender] for envelope in parcel.entry]
