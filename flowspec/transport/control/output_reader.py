"""One asynchronous reader of many jobs' outputs.

One blocking read waits for all of them on a connection of its own. Among the streams it reads is
one that only this reader uses: an entry in it ends the read, so that a new job joins at once and
nothing is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from flowspec.errors import BrokerError, BrokerFull, WaitsEnded
from flowspec.observe import logger
from flowspec.transport.base import OutputEntry
from flowspec.transport.connections.async_client import AsyncBrokerClient
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS
from flowspec.transport.control.replies import output_entries
from flowspec.transport.wire.entries import order, xread
from flowspec.transport.wire.keys import Keys

#: Most entries of one job per read.
BATCH = 64
#: How long the stream of wakes outlives a reader that was killed, ms.
_WAKE_MS = 60_000


class OutputFeed:
    """What has arrived of one job's output; ``OutputReader.follow`` makes it."""

    def __init__(self, job: str, cursor: str) -> None:
        self.job = job
        self.cursor = cursor
        self._arrived: asyncio.Queue[list[OutputEntry] | BrokerError] = asyncio.Queue()

    async def take(self, seconds: float) -> list[OutputEntry]:
        """The next entries; none after ``seconds``. The error that ended the reading."""
        try:
            async with asyncio.timeout(seconds):
                found = await self._arrived.get()
        except TimeoutError:
            return []
        if isinstance(found, BrokerError):
            raise found
        return found

    def put(self, found: list[OutputEntry] | BrokerError) -> None:
        """Hand over what was read, or why nothing will be."""
        if not isinstance(found, BrokerError):
            self.cursor = found[-1].cursor
        self._arrived.put_nowait(found)


class OutputReader:
    """Reads the outputs of the jobs that are followed.

    ``client``: for commands that do not block.
    """

    def __init__(self, client: AsyncBrokerClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._blocking: AsyncBrokerClient | None = None
        self._wake = keys.wake(secrets.token_hex(8))
        self._wake_cursor = "0-0"
        self._is_woken = False
        self._feeds: dict[str, list[OutputFeed]] = {}  # by stream
        self._task: asyncio.Task[None] | None = None

    @property
    def following(self) -> int:
        """The number of feeds."""
        return sum(map(len, self._feeds.values()))

    async def follow(self, job: str, cursor: str) -> OutputFeed:
        """A feed of the output of ``job`` after ``cursor``; end it by ``leave``."""
        feed = OutputFeed(job, "0-0" if cursor == "0" else cursor)
        self._feeds.setdefault(self._keys.out(job), []).append(feed)
        try:
            await self._join()
        except BaseException:
            self.leave(feed)
            raise
        return feed

    def leave(self, feed: OutputFeed) -> None:
        """End ``feed``; harmless if the reading has ended."""
        stream = self._keys.out(feed.job)
        feeds = self._feeds.get(stream, [])
        if feed in feeds:
            feeds.remove(feed)
        if not feeds:
            self._feeds.pop(stream, None)

    async def _join(self) -> None:
        """Make sure that a read with all streams is under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep(), name="outputs")
        elif not self._is_woken:
            self._is_woken = True
            # A broker that takes no writes is read: the read that is under way ends by itself.
            with contextlib.suppress(BrokerFull, TimeoutError):
                async with asyncio.timeout(MAX_BLOCK_SECONDS):
                    await self._client.run(
                        ("XADD", self._wake, "MAXLEN", 1, "*", "w", 1),
                        ("PEXPIRE", self._wake, _WAKE_MS),
                    )

    async def _keep(self) -> None:
        try:
            while self._feeds:
                self._deliver(*await self._read())
        except BrokerError as error:
            await self._end(error)
        except Exception as error:  # noqa: BLE001 - or the feeds would wait for ever
            logger(role="client").error("outputs not read", kind=type(error).__name__)
            await self._end(BrokerError(f"the outputs cannot be read: {type(error).__name__}"))

    async def _read(self) -> tuple[Mapping[str, str], Any]:
        """The cursors that were read behind, by stream, and what was found."""
        self._is_woken = False
        if self._blocking is None:
            self._blocking = AsyncBrokerClient(self._client.url, connections=1)
        cursors = {
            stream: min((feed.cursor for feed in feeds), key=order)
            for stream, feeds in self._feeds.items()
        }
        streams = {self._wake: self._wake_cursor, **cursors}
        (found,) = await self._blocking.run(xread(streams, MAX_BLOCK_SECONDS, BATCH))
        return streams, found

    def _deliver(self, cursors: Mapping[str, str], found: Any) -> None:
        """Hand out what was ``found`` behind ``cursors``.

        A feed that joined meanwhile, further back, would have a hole: the next read is for it.
        """
        for stream, entries in found or ():
            name = stream.decode()
            arrived = output_entries(entries)
            if name == self._wake:
                self._wake_cursor = arrived[-1].cursor
            for feed in self._feeds.get(name, ()):
                if order(feed.cursor) < order(cursors[name]):
                    continue
                new = [entry for entry in arrived if order(entry.cursor) > order(feed.cursor)]
                if new:
                    feed.put(new)

    async def _end(self, error: BrokerError) -> None:
        """Tell every feed why the reading has ended; the next ``follow`` begins anew.

        Nothing is waited for after that, or a ``follow`` would join a reading that is over.
        """
        await self._close_blocking()
        feeds = [feed for feeds in self._feeds.values() for feed in feeds]
        self._feeds.clear()
        for feed in feeds:
            feed.put(error)

    async def _close_blocking(self) -> None:
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            await blocking.close()

    def end_waits(self, why: str) -> None:
        """End what waits for output now with WaitsEnded; what is asked later begins anew."""
        feeds = [feed for feeds in self._feeds.values() for feed in feeds]
        self._feeds.clear()
        for feed in feeds:
            feed.put(WaitsEnded(why))

    async def close(self) -> None:
        """Stop reading, and leave nothing on the server."""
        self._feeds.clear()
        task = self._task
        if task is not None:
            with contextlib.suppress(BrokerError):
                if not task.done():
                    # To cancel it would take as long as the read may block.
                    await self._client.once(("XADD", self._wake, "*", "w", 1))
                    await asyncio.wait({task}, timeout=MAX_BLOCK_SECONDS)
                await self._client.once(("DEL", self._wake))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._close_blocking()
