"""Stamps of what a worker sends: in which box it is, and when."""

from __future__ import annotations

from flowspec.core.protocol.addresses import DRAFT, Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.stamps import Stamp
from flowspec.rehearse.devices.links import DirectedLinks, Leg
from flowspec.rehearse.devices.way import Travelling, Way, travelling


class Departures:
    """Charges the links out of ``node``'s box to what ``node`` sends.

    ``node`` alone sends through these links, unless the broker is in its box: then messages of
    others leave through them, too, and their receivers charge them (``Arrivals``).
    """

    def __init__(self, way: Way, node: Address, links: DirectedLinks) -> None:
        self._way = way
        self._box = way.box
        self._node = node
        self._links = links

    def stamp(self, output: Travelling, at: float) -> Stamp:
        """Where ``output``, sent at ``at``, is next, and when it is there.

        That is the receiver's box if it goes straight, else the broker's; the own box if its
        receivers charge the link out of it.
        """
        if self._box is None or self._box == self._node:
            return Stamp(at, self._node)
        entry = travelling(output, self._node)
        to = output.to if isinstance(output, Send | Bundle) else DRAFT
        target = to if self._way.is_straight(output) else self._box
        return Stamp(self._links.arrival(Leg(self._node, target), to, entry, at), target)
