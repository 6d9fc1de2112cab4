"""When messages of an emulated run reach a worker."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.core.protocol.messages import GRAPH, Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.emulation.profile import Profile


class Arrivals:
    """When messages reach ``node``: each directed link has its own free-at clock, kept where it
    ends.

    ``hidden``: whether answers to the job of that name carry the target's hidden rows.
    """

    def __init__(
        self, profile: Profile, node: str, *, hidden: Callable[[str], bool] = lambda job: False
    ) -> None:
        self._profile = profile
        self._node = node
        self._hidden = hidden
        self._free_at: dict[str, float] = {}
        self._let_go_at = 0.0  # when the graph's last envelope arrives

    def at(self, stamp: Stamp, envelope: Envelope) -> float:
        """Nominal time at which ``envelope`` arrives; messages of one source come in the order they
        left.
        """
        if stamp.source == self._node:
            return self._in_order(stamp.at, envelope)
        seconds = self._profile.transfer_seconds(
            self._node, envelope, hidden=self._hidden(envelope.message.job)
        )
        end = max(stamp.at, self._free_at.get(stamp.source, 0.0)) + seconds
        self._free_at[stamp.source] = end
        # Added up as the simulation does, so that equal costs give equal numbers.
        at = stamp.at + (self._profile.link.latency + (end - stamp.at))
        return self._in_order(at, envelope)

    def _in_order(self, at: float, envelope: Envelope) -> float:
        """What the graph lets go is read in that order, whoever let it go."""
        if envelope.sender == GRAPH:
            at = self._let_go_at = max(at, self._let_go_at)
        return at
