"""The inboxes that a worker writes into, and which of its links go straight.

A thread reads the leases once a second, connects to the announced inboxes of the worker's receivers
and measures the way there. A link without a connection goes through the control broker, and so does
one whose connection breaks.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Send
from flowspec.errors import BrokerError, ConfigError
from flowspec.observe import logger
from flowspec.transport.base import ROWS_CAP, Claim, Control, PutRows, role_of
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import Command
from flowspec.transport.link.inbox import FACT, Announced, why_none_of
from flowspec.transport.wire import codec, entries

#: Interval between two looks at the leases, and before a broken link is tried again, seconds.
LOOK_SECONDS = 1.0
RETRY_SECONDS = 5.0
#: How long a worker waits at start for its links to be decided, seconds.
DECIDE_SECONDS = 10.0
_PINGS = 5
_BULK = b"\x00" * (128 << 10)
#: Writes between two looks at the length of the receiver's stream.
_MEASURE_EVERY = 32
#: Bytes per second of a way on which a payload takes no longer than nothing does.
MOST_BANDWIDTH = 1e10


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """A measured way: ``latency`` one way in seconds, ``bandwidth`` in bytes per second."""

    latency: float
    bandwidth: float

    @property
    def facts(self) -> dict[str, object]:
        """For ``status``: milliseconds and Mbit/s; None: it is too fast to be measured so."""
        mbit = round(self.bandwidth * 8 / 1e6, 1) if self.bandwidth < MOST_BANDWIDTH else None
        return {"latency_ms": round(self.latency * 1e3, 3), "mbit": mbit}


class Posted(NamedTuple):
    """A message of an entry, and its rows if it has any."""

    send: Send
    rows: PutRows | None


class PeerInbox:
    """A connection to another worker's inbox; any error of it is BrokerUnreachable or BrokerError.

    ``unanswered``: entries that were written and not confirmed, oldest first.
    """

    def __init__(self, announced: Announced) -> None:
        self.announced = announced
        self.client = PipelinedClient(announced.url, patient=False)
        self.way = measure(self.client)
        self.unanswered: list[Sequence[Posted]] = []
        self._written = 0

    def post(self, entry: Sequence[Posted]) -> None:
        """Write messages of one sender, with their rows, as one entry."""
        self.unanswered.append(entry)
        self._written += 1
        length = [] if self._written % _MEASURE_EVERY else [("XLEN", self.announced.stream)]
        self.client.post([self._command(entry), *length])

    def _command(self, entry: Sequence[Posted]) -> Command:
        announced = self.announced
        sender = str(entry[0].send.envelope.sender)
        fields: list[Any] = ["p", announced.token, "f", sender]
        for send, rows in entry:
            fields += ["q", send.envelope.seq, "m", codec.encode(send.envelope.message)]
            if rows is not None:
                fields += entries.payload_fields(codec.encode_rows(rows.rows))
        return ("XADD", announced.stream, "NOMKSTREAM", "*", *fields)

    def collect(self) -> None:
        """Take the confirmation of the oldest entry; BrokerError if it was not written."""
        answer, *length = self.client.collect(at_once=True)
        if answer is None:
            raise BrokerError("the inbox is gone from its server")
        if isinstance(answer, Exception):
            raise BrokerError(str(answer))
        if length and isinstance(length[0], Exception):
            raise BrokerError(str(length[0]))
        if length and length[0] >= ROWS_CAP:
            raise BrokerError(f"{length[0]} entries wait in the inbox; its reader has stopped")
        del self.unanswered[0]

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


def measure(client: PipelinedClient) -> MeasuredWay:
    """Latency from round trips of nothing, bandwidth from those of a payload."""

    def seconds(command: Command) -> float:
        began = time.perf_counter()
        client.post([command])
        (answer,) = client.collect(at_once=True)
        if isinstance(answer, Exception):
            raise BrokerError(str(answer))
        return time.perf_counter() - began

    trip = statistics.median(seconds(("PING",)) for _ in range(_PINGS))
    loaded = statistics.median(seconds(("PING", _BULK)) for _ in range(3))
    extra = loaded - trip
    bandwidth = 2 * len(_BULK) / extra if extra > 0 else MOST_BANDWIDTH
    return MeasuredWay(trip / 2, min(bandwidth, MOST_BANDWIDTH))


class Peers:
    """The links of one worker to ``receivers``; ``control`` is a connection for its thread alone.

    ``straight``: whether links may go straight at all. ``url``: of the control broker, to measure
    the way there; empty: it is not measured.

    The thread only offers connections; the worker alone takes them up and gives them up.
    """

    def __init__(
        self, control: Control, receivers: Iterable[Address], *, straight: bool, url: str = ""
    ) -> None:
        self._control = control
        self._url = url
        self._receivers = tuple(receivers)
        self._straight = straight
        self._inboxes: dict[Address, PeerInbox] = {}
        self._offers: dict[Address, PeerInbox | None] = {}  # None: there is no inbox any more
        self._offered: dict[Address, Announced] = {}  # what the last offer was for
        self._reasons = dict.fromkeys(self._receivers, "its worker is not there")
        self._refused: dict[Address, tuple[Announced, float]] = {}  # until when
        self._claims: Mapping[str, Claim] = {}
        self._way: MeasuredWay | None = None  # to the control broker
        self._stop = threading.Event()
        self._looked = threading.Event()
        self._log = logger()
        self._thread = threading.Thread(target=self._keep, name="peers", daemon=True)

    def start(self) -> None:
        """Look for the receivers, now and from then on."""
        self._thread.start()

    def get(self, to: Address) -> PeerInbox | None:
        """The inbox of ``to``; None: the link goes through the broker."""
        if self._offers:
            self._take_offers()
        return self._inboxes.get(to)

    @property
    def inboxes(self) -> Sequence[tuple[Address, PeerInbox]]:
        """All links that go straight."""
        if self._offers:
            self._take_offers()
        return tuple(self._inboxes.items())

    def _take_offers(self) -> None:
        """Replace inboxes by those of newer leases.

        What was not confirmed is lost with an old one, whose reader begins anew.
        """
        for to in tuple(self._offers):
            offer = self._offers.pop(to)
            old = self._inboxes.pop(to, None)
            if old is not None:
                old.close()
            if offer is not None:
                self._inboxes[to] = offer

    @property
    def claims(self) -> Mapping[str, Claim]:
        """The leases as they were at the last look."""
        return self._claims

    def broken(self, to: Address, inbox: PeerInbox, reason: str) -> None:
        """Give up ``inbox``; the link to ``to`` goes through the broker from now on."""
        inbox.close()
        if self._inboxes.get(to) is not inbox:
            return
        del self._inboxes[to]
        self._leave(to, inbox.announced, reason)
        if self._offered.get(to) == inbox.announced:  # else a newer one is offered already
            del self._offered[to]

    def _leave(self, to: Address, announced: Announced, reason: str) -> None:
        """Leave the inbox ``announced`` alone for a while; ``reason``: an error of its server."""
        self._refused[to] = (announced, time.monotonic() + RETRY_SECONDS)
        self._reasons[to] = told = reason.replace("the broker", "its inbox", 1)
        self._log.warning("link goes through the broker", to=str(to), reason=told)

    def facts(self) -> dict[str, object]:
        """By receiver, the way of its link; for the lease and ``status``."""
        return {"links": {str(to): self._link_facts(to) for to in self._receivers}}

    def _link_facts(self, to: Address) -> dict[str, object]:
        inbox = self._inboxes.get(to)
        if inbox is not None:
            return {"way": "straight", **inbox.way.facts}
        known: dict[str, object] = {"way": "broker", "reason": self._reasons[to]}
        return known | (self._way.facts if self._way is not None else {})

    def wait(self, seconds: float = DECIDE_SECONDS) -> None:
        """Wait until the leases were looked at, and receivers that announce an inbox were tried."""
        self._looked.wait(seconds)

    def close(self) -> None:
        """Stop looking, and close all links."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_SECONDS * 3)
        self._take_offers()
        for to in tuple(self._inboxes):
            self._inboxes.pop(to).close()
        self._control.close()

    # ---- the thread ------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except BrokerError as error:
                self._log.info("links not looked at", reason=str(error))
            self._looked.set()
            self._stop.wait(LOOK_SECONDS)

    def _look(self) -> None:
        self._claims = self._control.claims()
        if self._way is None and self._url:
            self._way = self._measured()
        if not self._straight:
            self._reasons = dict.fromkeys(self._receivers, "as asked for")
            return
        for to in self._receivers:
            claim = self._claims.get(role_of(to))
            if claim is None:
                # Perhaps only its lease is late, and it still reads; a link that is dead breaks.
                self._reasons[to] = "its worker is not there"
                continue
            announced = Announced.read(claim.facts.get(FACT))
            if announced is None:
                self._reasons[to] = why_none_of(claim.facts)
                if self._offered.pop(to, None) is not None:
                    self._offers[to] = None
            elif self._offered.get(to) != announced and not self._resting(to, announced):
                self._connect(to, announced)

    def _measured(self) -> MeasuredWay:
        """The way to the control broker, which is one of the two of a link through it."""
        client = PipelinedClient(self._url, patient=False)
        try:
            return measure(client)
        finally:
            client.close()

    def _resting(self, to: Address, announced: Announced) -> bool:
        """Whether this inbox has failed a short while ago."""
        refused, until = self._refused.get(to, (None, 0.0))
        return refused == announced and time.monotonic() < until

    def _connect(self, to: Address, announced: Announced) -> None:
        try:
            inbox = PeerInbox(announced)
        except (BrokerError, ConfigError) as error:
            self._leave(to, announced, str(error))
            return
        self._offered[to] = announced
        self._offers[to] = inbox
        self._log.info("link goes straight", to=str(to), **inbox.way.facts)
