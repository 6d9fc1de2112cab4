"""A TCP relay that adds a slower link's latency and bandwidth to a program's connections.

    python -m ops.peer.relay --latency-ms 5 [--bytes-per-second N] TARGET...

One relay per TARGET (``host:port`` or the path of a unix socket), on 127.0.0.1. Prints their ports
in the order of the targets as one JSON list, and serves until standard input ends. A line of
standard input is a new latency in milliseconds, for all links from then on.

Each direction of each connection is a separate link: a chunk occupies it for bytes / bandwidth and
is delivered ``latency`` later, in order. A link's buffer is bounded; a faster sender waits, as it
would for a full socket.
"""

from __future__ import annotations

import asyncio
import json
import math
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from flowspec.errors import ConfigError, FlowSpecError
from flowspec.rehearse.devices.profile import LinkShape
from ops.parser import Parser

#: Bytes read at once; a link may exceed its bound by less than this.
CHUNK = 1 << 16
#: Maximum bytes held per direction beyond the link's bandwidth-delay product, as a socket buffer.
BUFFER = 1 << 20
_CONNECT_SECONDS = 5.0


class Direction:
    """One direction of one connection. ``held``, ``most_held``: bytes in it now, and maximum."""

    def __init__(self, shape: LinkShape, clock: Callable[[], float]) -> None:
        self.shape = shape
        self._clock = clock
        on_the_way = shape.bandwidth * shape.latency if math.isfinite(shape.bandwidth) else 0.0
        self.bound = BUFFER + int(on_the_way)
        self._free_at = 0.0
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._changed = asyncio.Event()
        self.held = 0
        self.most_held = 0

    async def take(self, reader: asyncio.StreamReader) -> None:
        """Read until the sender's end of stream, as room permits; OSError if the sender breaks."""
        while chunk := await reader.read(CHUNK):
            self._free_at = max(self._free_at, self._clock()) + len(chunk) / self.shape.bandwidth
            self._put(self._free_at + self.shape.latency, chunk)
            while self.held >= self.bound:
                self._changed.clear()
                await self._changed.wait()
        self._put(max(self._free_at, self._clock()) + self.shape.latency, b"")

    def _put(self, due: float, chunk: bytes) -> None:
        self._chunks.append((due, chunk))
        self.held += len(chunk)
        self.most_held = max(self.most_held, self.held)
        self._changed.set()

    async def give(self, writer: asyncio.StreamWriter) -> None:
        """Write each chunk when it is due, then end the stream; OSError if the receiver breaks."""
        while True:
            while not self._chunks:
                self._changed.clear()
                await self._changed.wait()
            due, chunk = self._chunks[0]
            if (wait := due - self._clock()) > 0:
                await asyncio.sleep(wait)
            if not chunk:
                writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()
            self._chunks.popleft()
            self.held -= len(chunk)
            self._changed.set()


class Relay:
    """Connects every connection to a port of 127.0.0.1 with ``target``, shaping both directions.

    ConfigError unless ``target`` is ``host:port`` or the path of a unix socket.
    """

    def __init__(self, target: str, shape: LinkShape) -> None:
        host, _, port = target.rpartition(":")
        if "/" not in target and not (host and port.isdigit()):
            raise ConfigError(
                f"relay target {target!r} is neither host:port nor the path of a unix socket"
            )
        self._target = target
        self._shape = shape
        self._server: asyncio.Server | None = None
        self._joined: set[asyncio.Task[Any]] = set()
        #: Both directions of every connection so far, the one to the target first.
        self.directions: list[Direction] = []
        self.port = 0

    async def start(self) -> int:
        """Start listening; return the port."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    def reshape(self, shape: LinkShape) -> None:
        """Shape what is sent from now on by ``shape``, on every connection."""
        self._shape = shape
        for direction in self.directions:
            direction.shape = shape

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        try:
            await self._serve(reader, writer)
        except* OSError as broken:
            # One side has failed; closing the connection tells the other.
            print(f"relay to {self._target}: {broken.exceptions[0]}", file=sys.stderr)
        finally:
            self._joined.discard(task)
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if "/" in self._target:
            return await asyncio.open_unix_connection(self._target)
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_SECONDS):
            far_reader, far_writer = await self._connect()
        clock = asyncio.get_running_loop().time
        out = Direction(self._shape, clock)
        back = Direction(self._shape, clock)
        self.directions += (out, back)
        try:
            for end in (writer, far_writer):
                _send_at_once(end)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(out.take(reader))
                tasks.create_task(out.give(far_writer))
                tasks.create_task(back.take(far_reader))
                tasks.create_task(back.give(writer))
        finally:
            far_writer.close()


def _send_at_once(writer: asyncio.StreamWriter) -> None:
    """No delay but the relay's: after ``drain`` all bytes must be in the kernel."""
    writer.transport.set_write_buffer_limits(0)
    end = writer.get_extra_info("socket")
    if end.family in (socket.AF_INET, socket.AF_INET6):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def run(main: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` with ``select``, whose timeouts are in microseconds, not milliseconds."""
    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    ) as runner:
        runner.run(main)


async def serve(targets: Sequence[str], shape: LinkShape) -> None:
    """Relay to ``targets`` until standard input ends, with the latencies that it gives."""
    relays = [Relay(target, shape) for target in targets]
    try:
        print(json.dumps([await relay.start() for relay in relays]), flush=True)
        ended = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
        while line := await ended.readline():
            shape = replace(shape, latency=float(line) / 1e3)
            for relay in relays:
                relay.reshape(shape)
    finally:
        for relay in relays:
            await relay.stop()


def main() -> None:
    parser = Parser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--bytes-per-second", type=float, default=math.inf)
    given = parser.parse_args()
    try:
        run(serve(given.targets, LinkShape(given.latency_ms / 1e3, given.bytes_per_second)))
    except FlowSpecError as error:
        sys.exit(f"relay: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
