"""Arrival times of an emulated run's messages at a worker."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.emulation.profile import Profile


class Arrivals:
    """Arrival times at ``node``; the end of a directed link keeps the link's free-at clock.

    ``hidden``: whether answers to a run carry the target's hidden rows.
    """

    def __init__(
        self,
        profile: Profile,
        node: Address,
        *,
        hidden: Callable[[RunKey], bool] = lambda run: False,
    ) -> None:
        self._profile = profile
        self._node = node
        self._hidden = hidden
        self._free_at: dict[Address, float] = {}
        self._let_go_at = 0.0  # arrival of the graph's last envelope

    def at(self, stamp: Stamp, envelope: Envelope) -> float:
        """Nominal time at which ``envelope`` arrives; a source's messages arrive in send order."""
        if stamp.source == self._node:
            return self._in_order(stamp.at, envelope)
        seconds = self._profile.transfer_seconds(
            self._node, envelope, hidden=self._hidden(envelope.message.run)
        )
        end = max(stamp.at, self._free_at.get(stamp.source, 0.0)) + seconds
        self._free_at[stamp.source] = end
        # The simulation's order of additions, so that equal costs give equal numbers.
        at = stamp.at + (self._profile.link.latency + (end - stamp.at))
        return self._in_order(at, envelope)

    def _in_order(self, at: float, envelope: Envelope) -> float:
        """Envelopes released by the graph arrive in release order, whichever worker caused it."""
        if envelope.sender == GRAPH:
            at = self._let_go_at = max(at, self._let_go_at)
        return at
