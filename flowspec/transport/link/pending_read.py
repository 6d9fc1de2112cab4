"""A read that is always under way, at a server beside the reader, without a thread.

The command that waits for the next entries is sent as soon as the last ones are taken, so what
arrives during a pass lies in the socket's buffer when the worker looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS, translate
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import Command
from flowspec.transport.wire.entries import taken, xread

#: Most entries of a stream in one read.
BATCH = 256


def is_cut(answer: Sequence[tuple[Any, Sequence[Any]]]) -> bool:
    """Whether a stream may hold more than a read's ``answer`` has of it.

    The rest has to be read before any of it is used: a log's entry may come with several of rows.
    """
    return any(len(entries) >= BATCH for _, entries in answer)


class PendingRead:
    """Reads the streams behind the cursors ``streams``; ``client`` is for this alone."""

    def __init__(self, client: PipelinedClient, streams: Mapping[str, str]) -> None:
        self._client = client
        self._cursors = dict(streams)
        self._post(MAX_BLOCK_SECONDS)

    @property
    def news(self) -> bool:
        """Whether the read has been answered, or its connection is lost."""
        return self._client.answered()

    def fileno(self) -> int:
        """The connection's file descriptor; only valid while there is no news."""
        return self._client.fileno()

    def take(self, *, waited: bool) -> Sequence[tuple[str, Sequence[Any]]]:
        """See ``Incoming``. An answer that came during a pass, or is cut, is followed by a read.

        The read that was under way is answered by the first of several entries, or by none after
        some seconds.
        """
        found = self._collect()
        more = not waited or is_cut(found)
        while more:
            self._post(0.0)
            last = self._collect()
            found += last
            more = is_cut(last)
        self._post(MAX_BLOCK_SECONDS)
        return found

    def _post(self, block_seconds: float) -> None:
        self._client.post([self._command(block_seconds)])

    def _command(self, block_seconds: float) -> Command:
        return xread(self._cursors, block_seconds, BATCH)

    def _collect(self) -> list[tuple[str, Sequence[Any]]]:
        (answer,) = self._client.collect()
        if isinstance(answer, redis.RedisError):
            raise translate(answer, self._client.url)
        return taken(answer or (), self._cursors)

    def close(self) -> None:
        """Close the connection; a read that is under way ends with it."""
        self._client.close()
