"""The way of a message: straight to its receiver, or by the box that the broker is in.

The product sends a segment or an answer straight to its receiver's own inbox unless the broker has
something to hold or to complete for it; everything else goes through the broker. Through the
broker a message takes two links, of which one or both are free if the broker's box is one of its
ends. Source: docs/testbed.md#the-way-of-a-message.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from flowspec.core.protocol import in_order
from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address, stage_address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.machine import Commit, Complete, Send
from flowspec.core.protocol.messages import Envelope, Synced
from flowspec.errors import ConfigError

#: The broker's own box: no worker is there, and the task graph, whose address this is, always is.
OWN_BOX = GRAPH
#: What travels through the links: a message, a commit, or a completion without a message.
Travelling = Send | Bundle | Commit | Complete

_PLACES = "draft, stage-N (like stage-2), own or none"


@dataclass(frozen=True, slots=True)
class Way:
    """Where the broker is, and which way rows go.

    ``at``: ``draft`` or ``stage-N``, beside that worker; ``own``: a box of its own; ``none``: no
    broker is charged, as papers have none: every message takes the link to its receiver, also one
    that the task graph held. ``rows``: ``straight`` to the receiver, or through the ``broker``.
    ConfigError for other values, and for rows through a broker that is not charged.
    """

    at: str = "draft"
    rows: str = "straight"

    def __post_init__(self) -> None:
        if self.at not in ("draft", "own", "none") and not self._stage:
            raise ConfigError(f"is {self.at!r}; expected {_PLACES}", "at")
        if self.rows not in ("straight", "broker"):
            raise ConfigError(
                f"is {self.rows!r}; expected straight (to their receiver) or broker (through it)",
                "rows",
            )
        if self.at == "none" and self.rows == "broker":
            raise ConfigError(
                "is 'broker', but at is 'none'; expected a place for the broker, or straight rows",
                "rows",
            )

    @property
    def _stage(self) -> int:
        """The stage that the broker is beside; 0: none."""
        name, _, number = self.at.partition("-")
        is_stage = name == "stage" and number.isascii() and number.isdigit() and number[0] != "0"
        return int(number) if is_stage else 0

    @property
    def box(self) -> Address | None:
        """The box that the broker is in: its worker's address or ``OWN_BOX``; None: not charged."""
        if self.at == "none":
            return None
        if self.at == "own":
            return OWN_BOX
        return stage_address(self._stage) if self._stage else DRAFT

    def check(self, stages: int) -> None:
        """ConfigError unless a pipeline of ``stages`` stages has the broker's box."""
        if self._stage > stages:
            raise ConfigError(
                f"the broker is at {self.at!r}, but there are {stages} stages; "
                f"expected draft, own, none, or a stage up to stage-{stages}"
            )

    def is_straight(self, output: Travelling) -> bool:
        """Whether ``output`` does not go through the broker."""
        return self.rows == "straight" and goes_straight(output)

    def route(self, node: Address, send: Send) -> tuple[Address, ...]:
        """The boxes that ``send`` passes from ``node`` to its receiver, both included."""
        box = self.box
        boxes: tuple[Address, ...] = (node, send.to)
        if box is not None and not self.is_straight(send):
            boxes = (node, box, send.to)
        return tuple(each for each, _ in groupby(boxes))

    def __str__(self) -> str:
        if self.at == "none":
            return "no broker is charged"
        places = {"draft": "beside the draft worker", "own": "on a box of its own"}
        place = places.get(self.at, f"beside stage {self._stage}")
        rows = "straight to the next stage" if self.rows == "straight" else "through it"
        return f"the broker is {place}, rows go {rows}"


#: As in papers: every message takes the link to its receiver.
NO_BROKER = Way("none")


def goes_straight(output: Travelling) -> bool:
    """Whether the product sends ``output`` straight where it sends rows so."""
    if isinstance(output, Bundle):
        return True
    return isinstance(output, Send) and in_order.goes_straight(output)


def travelling(output: Travelling, node: Address) -> tuple[Envelope, ...]:
    """The envelopes whose bytes ``output`` takes to the broker.

    A commit carries its prune once, whatever the number of stages. A completion has no message of
    its own, and is as long as the one that tells of it.
    """
    match output:
        case Send(envelope=envelope):
            return (envelope,)
        case Bundle():
            return output.envelopes
        case Commit(prunes=prunes):
            return prunes[:1]
        case Complete(run, tasks):
            return (Envelope(node, 0, Synced(run, tasks[0])),)
