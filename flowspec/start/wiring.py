"""A worker's inbox and its links, from the flags and the pipeline's record."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flowspec.core.protocol.addresses import DRAFT, Address, Role, middle_address, stage_address
from flowspec.core.protocol.holders import Holder
from flowspec.errors import BrokerError
from flowspec.observe import logger
from flowspec.rehearse.devices.setup import EMULATED
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.roles.lease import Lease
from flowspec.start.boot import Facts, Process
from flowspec.transport.base import Link, middles_of, role_of
from flowspec.transport.link.inbox import FACT, NONE, Inbox, InboxPlace, open_inbox, why_none
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.link.peers import Peers
from flowspec.transport.ways import AUTO, BROKER, ROWS, STRAIGHT

#: The key of the pipeline's record for how rows travel.
RECORD = "rows"


def add_rows(arguments: argparse.ArgumentParser) -> None:
    """Add the flags on how rows reach this worker and leave it."""
    arguments.add_argument(
        "--rows",
        choices=ROWS,
        help="how rows travel: straight into the next worker's inbox, through the broker, or auto: "
        "straight unless the broker is on the receiver's machine (default: as the record says)",
    )
    arguments.add_argument(
        "--inbox-url", default="", help="a Redis server for this worker's inbox, instead of its own"
    )
    arguments.add_argument(
        "--inbox-host",
        default="",
        help="address where the inbox listens (default: the one from which the broker is reached)",
    )
    arguments.add_argument(
        "--inbox-port", type=int, default=0, help="port of the inbox (default: any free one)"
    )
    arguments.add_argument(
        "--inbox-announce",
        default="",
        metavar="HOST:PORT",
        help="where others reach the inbox, if not at its own address and port",
    )


def receivers_of(address: Address, record: Mapping[str, str]) -> tuple[Address, ...]:
    """Those to whom ``address`` sends segments or answers."""
    stages = int(record["stages"])
    if address == DRAFT:
        middles = range(1, len(middles_of(record)) + 1)
        return (stage_address(1), *map(middle_address, middles))
    if address.role is Role.VERIFY and address.number < stages:
        return (stage_address(address.number + 1),)
    return (DRAFT,)


class Wiring:
    """The inbox of ``address``, if it has one, and the links to its receivers."""

    def __init__(
        self,
        process: Process,
        record: Mapping[str, str],
        address: Address,
        given: argparse.Namespace,
    ) -> None:
        self._process = process
        self._record = record
        self._address = address
        self._inbox: Inbox | None = None
        self._why_none = "its links are emulated"
        self.peers: Peers | None = None
        if EMULATED in record:
            return  # an emulated link's costs are those of its profile
        rows = given.rows or record.get(RECORD, AUTO)
        place = InboxPlace(
            given.inbox_url, given.inbox_host, given.inbox_port, given.inbox_announce
        )
        self._why_none = why_none(rows, process.url, place)
        if not self._why_none:
            # Where one is asked for, what stands in its way ends the worker.
            asked = rows == STRAIGHT or place != InboxPlace()
            self._inbox = self._open(place, asked=asked)
        self.peers = Peers(
            process.control(),
            receivers_of(address, record),
            straight=rows != BROKER,
            url=process.url,
        )
        self.peers.start()

    def _open(self, place: InboxPlace, *, asked: bool) -> Inbox | None:
        try:
            return open_inbox(self._process.url, self._process.keys, self._address, place)
        except BrokerError as error:
            if asked:
                raise
            logger(node=str(self._address)).warning("no inbox", reason=str(error))
            self._why_none = "its inbox could not be opened; its log says why"
            return None

    def facts(self) -> dict[str, object]:
        """For the lease: the inbox, if there is one, and the ways of the links."""
        links = self.peers.facts() if self.peers is not None else {}
        if self._inbox is None:
            return {NONE: self._why_none, **links}
        return {FACT: self._inbox.announced.facts, **links}

    def link(self, holder: Holder) -> Link:
        """The worker's link under ``holder``, once its receivers that are there have been tried."""
        stages = int(self._record["stages"])
        middles = len(middles_of(self._record))
        url = self._process.url
        keys = self._process.keys
        if self.peers is None:
            return EmulatedLink(url, keys, self._address, stages, middles=middles, holder=holder)
        self.peers.wait()
        return LiveLink(
            url,
            keys,
            self._address,
            stages,
            middles=middles,
            holder=holder,
            inbox=self._inbox,
            peers=self.peers,
        )

    def close(self) -> None:
        """Close the inbox and the links; harmless after the link was closed."""
        if self.peers is not None:
            self.peers.close()
        if self._inbox is not None:
            self._inbox.close()


def serve_wired(
    process: Process,
    record: Mapping[str, str],
    address: Address,
    given: argparse.Namespace,
    facts: Facts,
    serve: Callable[[Wiring, Lease], None],
) -> None:
    """Serve the role of ``address`` with ``serve``, over wirings that are in ``facts``."""

    @contextmanager
    def begin() -> Iterator[Callable[[Lease], None]]:
        wiring = Wiring(process, record, address, given)
        facts.begin(wiring.facts)
        try:
            yield lambda lease: serve(wiring, lease)
        finally:
            wiring.close()

    process.serve(role_of(address), facts, begin)
