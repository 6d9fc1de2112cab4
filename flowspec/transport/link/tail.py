"""A reader of streams on a thread of its own, for servers further away.

What arrives during a pass is there when the worker looks, and the next read is already under way: a
reader that asked only then would wait for a round trip to the server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.errors import BrokerError
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.link.pending_read import BATCH, is_cut
from flowspec.transport.wire.entries import taken, xread

#: Most entries held before reading pauses.
MOST_HELD = 1024

#: An entry as the server sends it: its id, and its names and values in turn.
Entry = Sequence[Any]


class Tail:
    """Reads the streams behind the cursors ``streams``.

    ``patient``: whether a lost server is tried again for some seconds; if not, the first loss ends
    the reading.
    """

    def __init__(
        self, client: DirectClient, streams: Mapping[str, str], *, patient: bool = True
    ) -> None:
        self._client = client
        self._patient = patient
        self._cursors = dict(streams)
        self._found: list[tuple[str, Sequence[Entry]]] = []
        self._held = 0
        self._error: BrokerError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._bell = _Bell()
        self._thread = threading.Thread(target=self._keep, name="tail", daemon=True)
        self._thread.start()

    @property
    def news(self) -> bool:
        """Whether ``take`` has something to return or raise."""
        return bool(self._found) or self._error is not None

    def fileno(self) -> int:
        """A file descriptor that is readable when there is news."""
        return self._bell.fileno()

    def take(self, *, waited: bool) -> Sequence[tuple[str, Sequence[Any]]]:
        """What has arrived, as (stream, entries) in order; the error that ended the reading."""
        with self._changed:
            found = self._found
            self._found = []
            self._held = 0
            self._bell.silence()
            self._changed.notify_all()
        if not found and self._error is not None:
            raise self._error
        return found

    def _keep(self) -> None:
        while not self._closed:
            try:
                found = self._read()
            except BrokerError as error:
                self._end(error)
                return
            if found:
                self._hold(found)

    def _read(self) -> list[tuple[str, Sequence[Entry]]]:
        found: list[tuple[str, Sequence[Entry]]] = []
        block_seconds = MAX_BLOCK_SECONDS
        while True:
            command = xread(self._cursors, block_seconds, BATCH)
            answer: Any = (
                self._client.run([command])[0] if self._patient else self._client.once(command)
            )
            last = taken(answer or (), self._cursors)
            found += last
            if not is_cut(last):
                return found
            block_seconds = 0.0

    def _hold(self, found: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        with self._changed:
            self._found += found
            self._held += sum(len(entries) for _, entries in found)
            self._bell.ring()
            while self._held > MOST_HELD and not self._closed:
                self._changed.wait()

    def _end(self, error: BrokerError) -> None:
        with self._changed:
            self._error = error
            self._bell.ring()

    def close(self) -> None:
        """Stop reading; a read that is under way ends by itself."""
        with self._changed:
            self._closed = True
            self._bell.close()
            self._changed.notify_all()
        self._client.close()


class _Bell:
    """Makes a file descriptor readable from another thread; callers hold one lock."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        self._rings = False

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        if not self._rings and self._rung.fileno() >= 0:
            self._rung.send(b"\0")
            self._rings = True

    def silence(self) -> None:
        if self._rings:
            self._heard.recv(1)
            self._rings = False

    def close(self) -> None:
        self._heard.close()
        self._rung.close()
