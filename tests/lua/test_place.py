"""place: a job that has lost its place gets it back."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, QUEUE, RUNNING, Call, snapshot

KEYS = [JOB, QUEUE, RUNNING]


def test_a_job_gets_the_place_that_its_state_names(call: Call, client: redis.Redis) -> None:
    client.rpush(QUEUE, "i")
    client.hset(JOB, "state", "queued")
    assert call("place", KEYS, "j") is Code.OK
    assert client.lrange(QUEUE, 0, -1) == [b"i", b"j"]
    client.delete(QUEUE)
    client.hset(JOB, "state", "running")
    assert call("place", KEYS, "j") is Code.OK
    assert client.smembers(RUNNING) == {b"j"}


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_job_that_has_its_place_keeps_it(call: Call, client: redis.Redis, state: str) -> None:
    client.hset(JOB, "state", state)
    call("place", KEYS, "j")
    before = snapshot(client)
    assert call("place", KEYS, "j") is Code.DUP
    assert snapshot(client) == before


@pytest.mark.parametrize("state", ["done", "", None, "another type"])
def test_a_job_that_has_ended_gets_none(call: Call, client: redis.Redis, state: str | None) -> None:
    if state == "another type":
        client.set(JOB, "x")
    elif state is not None:
        client.hset(JOB, "state", state)
    before = snapshot(client)
    assert call("place", KEYS, "j") is Code.STALE
    assert snapshot(client) == before
