"""The relay keeps bytes and order, adds its link's delay, and holds a bounded amount."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import LinkShape
from ops.peer.relay import CHUNK, Relay, run

pytestmark = pytest.mark.live

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def relayed(handler: Handler, shape: LinkShape) -> AsyncIterator[tuple[Relay, Ends]]:
    """A connection to ``handler`` through a relay with ``shape``."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    relay = Relay(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", shape)
    reader, writer = await asyncio.open_connection("127.0.0.1", await relay.start())
    try:
        yield relay, (reader, writer)
    finally:
        writer.close()
        await relay.stop()
        server.close()


async def round_trips(ends: Ends, count: int) -> list[float]:
    reader, writer = ends
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(b"ping")
        await reader.readexactly(4)
        seconds.append(time.perf_counter() - began)
    return seconds


@pytest.mark.parametrize("latency", [0.0, 0.005, 0.02])
def test_a_round_trip_takes_twice_the_latency_at_least(latency: float) -> None:
    async def measure() -> None:
        async with relayed(echo, LinkShape(latency, math.inf)) as (_, ends):
            taken = await round_trips(ends, 41)
            assert 2 * latency <= min(taken)

    run(measure())


def test_messages_on_the_way_do_not_wait_for_each_other() -> None:
    async def measure() -> None:
        async with relayed(echo, LinkShape(1.0, math.inf)) as (_, (reader, writer)):
            began = time.perf_counter()
            for _ in range(100):
                writer.write(b"ping")
                await asyncio.sleep(0.001)
            await reader.readexactly(400)
            one_by_one = 100 * 2 * 1.0
            assert 2.0 <= time.perf_counter() - began < one_by_one / 4

    run(measure())


def test_a_new_latency_holds_for_connections_that_are_open() -> None:
    async def measure() -> None:
        async with relayed(echo, LinkShape(0.0, math.inf)) as (relay, ends):
            await round_trips(ends, 3)
            relay.reshape(LinkShape(0.02, math.inf))
            assert min(await round_trips(ends, 5)) >= 0.04

    run(measure())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [LinkShape(0.0, math.inf), LinkShape(0.003, 20e6)])
def test_bytes_and_their_order_are_kept(seed: int, shape: LinkShape) -> None:
    draw = random.Random(seed)
    pieces = [draw.randbytes(draw.choice([1, 100, 5_000, 150_000])) for _ in range(20)]

    async def send() -> bytes:
        async with relayed(echo, shape) as (_, (reader, writer)):
            for piece in pieces:
                writer.write(piece)
            writer.write_eof()
            return await reader.read(-1)

    async def compare() -> None:
        assert await send() == b"".join(pieces)

    run(compare())


def test_bandwidth_bounds_each_direction_by_itself() -> None:
    async def measure() -> None:
        async with relayed(echo, LinkShape(0.0, 1e6)) as (_, (reader, writer)):
            began = time.perf_counter()
            writer.write(bytes(200_000))
            await reader.readexactly(200_000)
            taken = time.perf_counter() - began
            assert taken >= 0.2

    run(measure())


def test_what_the_relay_holds_is_bounded_when_nobody_reads() -> None:
    released = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.write(b"%d" % len(await reader.read(-1)))
        writer.close()

    async def flood() -> None:
        sent = bytes(32 << 20)
        async with relayed(deaf, LinkShape(0.0, math.inf)) as (relay, (reader, writer)):
            writer.write(sent)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.5)
            towards = relay.directions[0]
            assert towards.bound <= towards.held <= towards.most_held < towards.bound + CHUNK
            released.set()
            writer.write_eof()
            assert int(await reader.read(-1)) == len(sent)

    run(flood())


def test_a_target_that_is_gone_closes_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    async def attempt() -> None:
        relay = Relay("127.0.0.1:1", LinkShape(0.0, math.inf))
        reader, writer = await asyncio.open_connection("127.0.0.1", await relay.start())
        assert await reader.read(-1) == b""
        writer.close()
        await relay.stop()

    run(attempt())
    assert "relay to 127.0.0.1:1: " in capsys.readouterr().err


def test_a_target_that_cannot_be_one_is_refused() -> None:
    for target in ("", "localhost", "localhost:", ":80", "localhost:http"):
        with pytest.raises(ConfigError, match="neither host:port"):
            Relay(target, LinkShape(0.0, math.inf))


def test_the_command_relays_to_a_unix_socket_until_its_input_ends(tmp_path: Path) -> None:
    place = tmp_path / "s"

    async def talk() -> None:
        server = await asyncio.start_unix_server(echo, place)
        command = [sys.executable, "-m", "ops.peer.relay", "--latency-ms", "2", str(place)]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*command, **pipes, env=os.environ)
        assert process.stdin is not None and process.stdout is not None
        (port,) = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert min(await round_trips((reader, writer), 5)) >= 0.004
        writer.close()
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 20) == 0
        server.close()

    asyncio.run(talk())


def test_the_command_says_what_is_wrong() -> None:
    command = [sys.executable, "-m", "ops.peer.relay", "--latency-ms", "-1", "localhost:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("relay: a link has latency -0.001 s")
