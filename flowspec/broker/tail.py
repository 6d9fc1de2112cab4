"""A reader of streams on a thread of its own.

What arrives during a pass is there when the worker looks, and the next read is already under way: a
reader that asked only then would wait for a round trip to the server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.broker.connection import MAX_BLOCK_SECONDS
from flowspec.broker.entries import xread
from flowspec.broker.redis_client import DirectClient
from flowspec.errors import BrokerError

#: Most entries of a stream in one read, and most entries held before reading pauses.
BATCH = 256
MOST_HELD = 1024

#: An entry as the server sends it: its id, and its names and values in turn.
Entry = Sequence[Any]


class Tail:
    """Reads the streams behind the cursors ``streams``.

    ``arrived`` is notified when there is something to take; a worker waits on one for all its
    tails. ``patient``: whether a lost server is tried again for some seconds; if not, the first
    loss ends the reading.
    """

    def __init__(
        self,
        client: DirectClient,
        streams: Mapping[str, str],
        arrived: threading.Condition,
        *,
        patient: bool = True,
    ) -> None:
        self._client = client
        self._patient = patient
        self._cursors = dict(streams)
        self._arrived = arrived
        self._found: list[tuple[str, list[Entry]]] = []
        self._held = 0
        self._error: BrokerError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="tail", daemon=True)
        self._thread.start()

    @property
    def news(self) -> bool:
        """Whether ``take`` has something to return or raise."""
        return bool(self._found) or self._error is not None

    def take(self) -> list[tuple[str, list[Entry]]]:
        """What has arrived, as (stream, entries) in order; the error that ended the reading."""
        with self._arrived:
            found = self._found
            self._found = []
            self._held = 0
            self._arrived.notify_all()
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

    def _read(self) -> Any:
        command = xread(self._cursors, MAX_BLOCK_SECONDS, BATCH)
        return self._client.run([command])[0] if self._patient else self._client.once(command)

    def _hold(self, found: Sequence[Any]) -> None:
        with self._arrived:
            for stream, entries in found:
                name = stream.decode()
                self._cursors[name] = entries[-1][0].decode()
                self._found.append((name, entries))
                self._held += len(entries)
            self._arrived.notify_all()
            while self._held > MOST_HELD and not self._closed:
                self._arrived.wait()

    def _end(self, error: BrokerError) -> None:
        with self._arrived:
            self._error = error
            self._arrived.notify_all()

    def close(self) -> None:
        """Stop reading; a read that is under way ends by itself."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
        self._client.close()
