"""What arrives in a worker's streams: read in the worker's own thread, or in one beside it.

Beside a server within ``NEAR_SECONDS`` the worker reads itself, which saves the hand-over between
two threads on every hop. From a server further away a read takes too long to wait for: there a
thread reads on during a pass (``tail``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.link.pending_read import PendingRead
from flowspec.transport.link.tail import Tail

#: Longest round trip to a server that a worker reads from in its own thread, seconds.
NEAR_SECONDS = 1e-3
_TRIPS = 5


class Incoming(Protocol):
    """Entries of some streams, in order, behind the cursors that the reading began with."""

    @property
    def news(self) -> bool:
        """Whether ``take`` has something to look at."""
        ...

    def fileno(self) -> int:
        """A file descriptor that is readable when there is news."""
        ...

    def take(self, *, waited: bool) -> Sequence[tuple[str, Sequence[Any]]]:
        """What has arrived, as (stream, entries); BrokerError if the server is lost.

        ``waited``: whether the worker was waiting for it; if not, there may be more.
        """
        ...

    def close(self) -> None: ...


def open_incoming(url: str, streams: Mapping[str, str], *, patient: bool = True) -> Incoming:
    """What comes behind the cursors ``streams`` at the server ``url``.

    ``patient``: whether a lost server is tried again for some seconds.
    """
    client = PipelinedClient(url, patient=patient)
    if _round_trip_seconds(client) <= NEAR_SECONDS:
        return PendingRead(client, streams)
    client.close()
    return Tail(DirectClient(url), streams, patient=patient)


def _round_trip_seconds(client: PipelinedClient) -> float:
    """The shortest of some round trips: a busy machine must not look like a long link."""
    shortest = float("inf")
    for _ in range(_TRIPS):
        began = time.perf_counter()
        client.run([("INFO", "server")])  # a server that cannot save refuses PING
        shortest = min(shortest, time.perf_counter() - began)
    return shortest
