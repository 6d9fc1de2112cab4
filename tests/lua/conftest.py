from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import redis

from flowspec.core.protocol.codes import Code
from flowspec.transport.connections.scripts import load
from tests.addresses import D0, S1, S2

Call = Callable[..., Code]
CallList = Callable[..., list[Code]]

JOB = "t:{p}:job"
REQUEST = "t:{p}:request"
RUN = "t:{p}:run"
OUT = "t:{p}:out"
RECORDING = "t:{p}:recording"
QUEUE = "t:{p}:queue"
RUNNING = "t:{p}:running"
LOGS = tuple(f"t:{{p}}:log:{address}" for address in (D0, S1, S2))
GENERATIONS = "t:{p}:generations"
CLAIM = "t:{p}:claim"
SUBMISSIONS = "t:{p}:submissions"
WAKE = "t:{p}:log:scheduler"


@pytest.fixture
def call(client: redis.Redis) -> Call:
    """``call(script, keys, *arguments)`` on a real, empty server."""

    def run(name: str, keys: Sequence[str], *arguments: object) -> Code:
        return Code(client.eval(load()[name].text, len(keys), *keys, *arguments))  # type: ignore[arg-type]

    return run


@pytest.fixture
def call_list(client: redis.Redis) -> CallList:
    """As ``call``, of a script that returns a code for each of several messages."""

    def run(name: str, keys: Sequence[str], *arguments: object) -> list[Code]:
        found = client.eval(load()[name].text, len(keys), *keys, *arguments)  # type: ignore[arg-type]
        return [Code(code) for code in found]  # type: ignore[union-attr]

    return run


@pytest.fixture
def running(client: redis.Redis) -> redis.Redis:
    """A server with one job running under epoch 3 with context length 5."""
    client.hset(JOB, mapping={"state": "running", "epoch": 3, "offset": 5, "emitted": 0})
    client.sadd(RUNNING, "j")
    return client


def snapshot(client: redis.Redis) -> dict[bytes, object]:
    """The server's whole contents, to check that a refused call changed nothing."""
    found: dict[bytes, object] = {}
    for key in client.scan_iter():
        kind = client.type(key)
        if kind == b"hash":
            found[key] = client.hgetall(key)
        elif kind == b"stream":
            found[key] = client.xrange(key)
        elif kind == b"list":
            found[key] = client.lrange(key, 0, -1)
        elif kind == b"set":
            found[key] = client.smembers(key)
        else:
            found[key] = client.get(key)
    return found
