"""A worker's own inbox: a small stream server beside it, into which others write straight.

A segment or an answer, its envelope and its rows, is one entry there, and crosses one link instead
of two; so are those of several runs that travel together. The worker announces the inbox in its
lease. Who may write is decided by a password, and by the inbox's token, which every entry repeats:
an entry without it was meant for another inbox.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.errors import BrokerError, ConfigError, WireError
from flowspec.observe import logger
from flowspec.transport.connections.connection import connect, translate
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.server import Listen, PrivateBroker
from flowspec.transport.link.incoming import Incoming, open_incoming
from flowspec.transport.link.log_reader import LogReader, Untrimmed
from flowspec.transport.ways import BROKER, STRAIGHT, check_rows
from flowspec.transport.wire import entries
from flowspec.transport.wire.keys import Keys

#: Fact of a lease in which a worker announces its inbox.
FACT = "inbox"
#: Fact in which one without tells why.
NONE = "no_inbox"
#: Most memory of an inbox's server; its entries are removed as they are read.
MEMORY = "1gb"
#: Characters of a reason in another worker's lease.
_LONGEST_WHY = 200
_PEER = "peer"
_LAST_PORT = 65_535
_PEER_MAY = "resetchannels -@all +xadd +xlen +ping +info +hello"


@dataclass(frozen=True, slots=True)
class Announced:
    """What others need to write into an inbox: a URL, password included, a stream, the token."""

    url: str
    stream: str
    token: str

    @property
    def facts(self) -> dict[str, str]:
        """As it stands in a lease."""
        return {"url": self.url, "stream": self.stream, "token": self.token}

    @classmethod
    def read(cls, facts: object) -> Announced | None:
        """The inbox that a lease announces; None: none, or nothing that is understood."""
        if not isinstance(facts, Mapping):
            return None
        values = [facts.get(name) for name in ("url", "stream", "token")]
        if not all(isinstance(value, str) and value for value in values):
            return None
        return cls(*map(str, values))


@dataclass(frozen=True, slots=True)
class InboxPlace:
    """Where a worker's inbox is.

    ``url``: a server that runs already; empty: one of its own, listening at ``host`` (empty: the
    address from which the control broker is reached) and ``port`` (0: any free one). ``announce``:
    host and port at which others reach it, if these are not its own.
    """

    url: str = ""
    host: str = ""
    port: int = 0
    announce: str = ""

    def __post_init__(self) -> None:
        """ConfigError for a port or an announced address that cannot be."""
        if not 0 <= self.port <= _LAST_PORT:
            raise ConfigError(f"--inbox-port is {self.port}; expected 0 (any) to {_LAST_PORT}")
        _, _, port = self.announce.rpartition(":")
        if self.announce and not (port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
            raise ConfigError(
                f"--inbox-announce is {self.announce!r}; expected HOST:PORT, as others reach it"
            )


class Inbox:
    """The inbox of one worker, read by it alone."""

    def __init__(self, url: str, announced: Announced, server: PrivateBroker | None = None) -> None:
        self.announced = announced
        self._server = server
        self._url = url
        self._incoming: Incoming | None = None
        self._trimmer = PipelinedClient(url, patient=False)
        self._cursor = "0-0"
        self._untrimmed = Untrimmed()
        self._closed = False
        self._create()

    def _create(self) -> None:
        """Create the stream: writers never do, so that none outlives its reader."""
        stream = self.announced.stream
        self._trimmer.run([("XADD", stream, "0-1", "p", ""), ("XTRIM", stream, "MAXLEN", 0)])
        self._cursor = "0-1"

    def start(self) -> None:
        """Read from now on."""
        stream = {self.announced.stream: self._cursor}
        self._incoming = open_incoming(self._url, stream, patient=False)

    @property
    def news(self) -> bool:
        """Whether ``take`` has something to return or raise."""
        return self._incoming is not None and self._incoming.news

    def fileno(self) -> int:
        """A file descriptor that is readable when there is news, once started."""
        assert self._incoming is not None
        return self._incoming.fileno()

    def take(self, reader: LogReader, refused: list[str], *, waited: bool) -> list[Envelope]:
        """What has arrived; rows go into ``reader``, a line on each bad entry into ``refused``.

        BrokerError if the inbox's server is lost. ``waited``: as ``Incoming.take``'s.
        """
        assert self._incoming is not None
        found = []
        for _, arrived in self._incoming.take(waited=waited):
            for entry, flat in arrived:
                self._cursor = entry.decode()
                self._untrimmed.note(self.announced.stream, flat)
                try:
                    parts = entries.parts(flat)
                except WireError as error:
                    refused.append(f"{self.announced.stream} {self._cursor}: {error}")
                    continue
                bundle = reader.bundle_of(parts)
                for part in parts:
                    try:
                        found.append(self._envelope(part, bundle))
                        # Without its rows a segment fails its job at once; without itself, late.
                        _keep_rows(found[-1], part, reader)
                    except WireError as error:
                        refused.append(f"{self.announced.stream} {self._cursor}: {error}")
        self._trim()
        return found

    def _envelope(self, entry: entries.Fields, bundle: int) -> Envelope:
        if entries.text(entry, b"p") != self.announced.token:
            raise WireError("an entry for another inbox")
        envelope = entries.envelope(entry, bundle)
        message = envelope.message
        if not isinstance(message, Segment | Answer):
            raise WireError(f"a {type(message).__name__} does not go straight")
        return envelope

    def _trim(self) -> None:
        """Remove what has been read, now and then, on a connection that no read blocks."""
        while self._trimmer.under_way > 1:
            self._trimmer.collect(at_once=True)
        if self._untrimmed.many:
            behind = entries.after(self._cursor)
            self._trimmer.post([("XTRIM", self.announced.stream, "MINID", behind)])
            self._untrimmed = Untrimmed()

    def close(self) -> None:
        """Close the connections, remove the stream, stop the server if it is the inbox's own."""
        if self._closed:
            return
        self._closed = True
        if self._incoming is not None:
            self._incoming.close()
        self._trimmer.close()
        if self._server is not None:
            self._server.stop()
        else:
            self._remove()

    def _remove(self) -> None:
        """Remove the stream from a server that others use too."""
        try:
            BrokerClient(self._url).run([("DEL", self.announced.stream)])
        except BrokerError as error:
            logger().info("inbox not removed", reason=str(error))


def _keep_rows(envelope: Envelope, entry: entries.Fields, reader: LogReader) -> None:
    """Give the rows beside ``envelope`` to ``reader``; WireError if they are damaged."""
    message = envelope.message
    if b"d" in entry and isinstance(message, Segment | Answer):
        reader.keep(message.run, message.segment, entries.payload(entry))


def why_none(rows: str, control_url: str, place: InboxPlace) -> str:
    """Why a worker has no inbox; empty: it should have one.

    ``rows``: one of ROWS. With ``auto`` a worker has one if its place is given or if the control
    broker is on another machine: one on the worker's own is as near as an inbox would be. Beside a
    broker that is reached over TLS ``auto`` opens none without. ConfigError for a place that would
    not be used.
    """
    check_rows(rows)
    given = place != InboxPlace()
    if rows == BROKER:
        if given:
            raise ConfigError("with --rows broker there is no inbox; leave out the --inbox flags")
        return "its rows go through the broker, as asked for"
    if rows == STRAIGHT or given:
        return ""
    if _is_tls(control_url):
        logger().warning("no inbox", reason="the broker is reached over TLS; give --inbox-url")
        return "the broker is reached over TLS; give it --inbox-url"
    return "the broker is on its machine" if _is_local(control_url) else ""


def why_none_of(facts: Mapping[str, Any]) -> str:
    """Why the worker whose lease has ``facts``, others' data, has no inbox; one line."""
    why = facts.get(NONE)
    if not isinstance(why, str) or not why.isprintable() or not 0 < len(why) <= _LONGEST_WHY:
        return "it has no inbox"
    return why


def open_inbox(control_url: str, keys: Keys, address: Address, place: InboxPlace) -> Inbox:
    """The inbox of ``address`` at ``place``; ConfigError or BrokerError if there cannot be one."""
    token = secrets.token_hex(8)
    stream = f"{keys.tag}:inbox:{address}:{token}"
    if place.url:
        announced = Announced(_elsewhere(place.url, place.announce), stream, token)
        try:
            return Inbox(place.url, announced)
        except ConfigError as error:
            raise ConfigError(f"--inbox-url: {error}") from None
    password = secrets.token_urlsafe(24)
    listen = _listen(control_url, place)
    users = (f"{_PEER} on >{password} ~{stream} {_PEER_MAY}",)
    server = PrivateBroker(maxmemory=MEMORY, listen=listen, users=users)
    own = server.start()
    if listen is None:
        shared = own.replace("unix://:", f"unix://{_PEER}:", 1)
        shared = shared.replace(_password(own), password, 1)
    else:
        shared = f"redis://{_PEER}:{password}@{place.announce or listen.in_url}/0"
    try:
        return Inbox(own, Announced(shared, stream, token), server)
    except BaseException:
        server.stop()
        raise


def _listen(control_url: str, place: InboxPlace) -> Listen | None:
    """Where a server of one's own listens; None: on a unix socket, as the control broker does."""
    if _is_tls(control_url):
        raise ConfigError(
            "the control broker is reached over TLS, an inbox of its own would not be; give a "
            "server with TLS as --inbox-url rediss://..., or --rows broker"
        )
    if urlsplit(control_url).scheme == "unix" and not place.host:
        return None
    host = place.host or _ends(control_url)[0]
    return Listen(host, free_port(host, place.port))


def _elsewhere(url: str, announce: str) -> str:
    """``url`` with host and port ``announce``, if there are any."""
    if not announce:
        return url
    parts = urlsplit(url)
    before, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{before}{at}{announce}").geturl()


def _password(url: str) -> str:
    return url.partition("://:")[2].partition("@")[0]


def free_port(host: str, port: int = 0) -> int:
    """``port``, or one that is free at ``host``.

    ConfigError if that is no address of this machine, or the port is not free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As the server itself binds: connections of an earlier one may still be closing.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--inbox-port {port} is in use at {host}; give another one, or 0 for any"
                ) from None
            raise ConfigError(
                f"an inbox cannot listen at {host}: {error}; give an address of this machine as "
                "--inbox-host"
            ) from None
        return int(probe.getsockname()[1])


def _is_tls(url: str) -> bool:
    return urlsplit(url).scheme in ("rediss", "valkeys")


def _is_local(url: str) -> bool:
    """Whether the broker at ``url`` is on this machine."""
    if urlsplit(url).scheme == "unix":
        return True
    own, other = _ends(url)
    return own == other


def _ends(url: str) -> tuple[str, str]:
    """This machine's address on a connection to ``url``, and the other end's."""
    client = connect(url)
    try:
        connection: Any = client.connection_pool.get_connection()
        sock = connection._sock  # redis-py has no public name for it
        return str(sock.getsockname()[0]), str(sock.getpeername()[0])
    except redis.RedisError as error:
        raise translate(error, url) from None
    finally:
        client.close()
