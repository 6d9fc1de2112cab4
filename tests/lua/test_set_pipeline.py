from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import GENERATIONS, Call, snapshot

RECORD = "t:{p}:pipeline"
KEYS = [RECORD, GENERATIONS]


@pytest.mark.parametrize("by", ["", "scheduler:2"])
def test_it_takes_the_place_of_what_is_there(call: Call, client: redis.Redis, by: str) -> None:
    client.hset(GENERATIONS, "scheduler", 2)
    client.set(RECORD, "text")
    assert call("set_pipeline", KEYS, by, "stages", "2", "target", "a") is Code.OK
    assert client.hgetall(RECORD) == {b"stages": b"2", b"target": b"a"}
    assert call("set_pipeline", KEYS, by, "stages", "3") is Code.OK
    assert client.hgetall(RECORD) == {b"stages": b"3"}


def test_a_scheduler_that_was_replaced_writes_nothing(call: Call, client: redis.Redis) -> None:
    client.hset(GENERATIONS, "scheduler", 2)
    before = snapshot(client)
    assert call("set_pipeline", KEYS, "scheduler:1", "stages", "2") is Code.STALE
    assert snapshot(client) == before
