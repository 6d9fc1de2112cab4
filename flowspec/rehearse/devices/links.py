"""Directed links between boxes: each carries one entry at a time, then takes its latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Envelope


class Leg(NamedTuple):
    """A directed link: the boxes at its ends."""

    source: Address
    target: Address


class DirectedLinks:
    """The links that a driver charges, with the time until which each is taken.

    ``latency(source, target, envelope)``, ``occupy(source, to, envelope)``: seconds; ``to`` is the
    message's receiver, behind whatever links. None: a message occupies no link.
    """

    def __init__(
        self,
        latency: Callable[[Address, Address, Envelope], float],
        occupy: Callable[[Address, Address, Envelope], float] | None = None,
    ) -> None:
        self._latency = latency
        self._occupy = occupy
        self._free_at: dict[Leg, float] = {}

    def arrival(self, leg: Leg, to: Address, entry: Sequence[Envelope], at: float) -> float:
        """When an entry for ``to`` is at the end of ``leg`` that enters it at ``at``.

        Entries enter a link in the order of these calls. Within one box one arrives at once.
        """
        if leg.source == leg.target:
            return at
        seconds = self._latency(leg.source, leg.target, entry[0])
        if self._occupy is not None:
            taken = sum(self._occupy(leg.source, to, envelope) for envelope in entry)
            end = max(at, self._free_at.get(leg, 0.0)) + taken
            self._free_at[leg] = end
            seconds += end - at
        return at + seconds
