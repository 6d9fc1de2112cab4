"""finish: the owner ends a job; its data expires."""

from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, OUT, RECORDING, REQUEST, RUN, RUNNING, WAKE, Call, snapshot

KEYS = [JOB, RUN, OUT, RECORDING, RUNNING, WAKE, REQUEST]


def test_ok_ends_the_job_and_lets_it_expire(call: Call, running: redis.Redis) -> None:
    running.hset(RUN, "d:x", 1)
    running.xadd(RECORDING, {"l": "line"})
    running.hset(REQUEST, "f:prompt", "hello")
    assert (
        call("finish", KEYS, 3, "j", "length", "", '{"tokens": 2}', 60_000, "", "failed") is Code.OK
    )
    ((_, end),) = running.xrange(OUT)
    assert end == {b"kind": b"end", b"finish_reason": b"length", b"stats": b'{"tokens": 2}'}
    assert running.hget(JOB, "state") == b"done"
    assert running.smembers(RUNNING) == set()
    assert running.exists(RUN) == 0
    assert all(0 < running.pttl(key) <= 60_000 for key in (JOB, OUT, RECORDING, REQUEST))
    ((_, woken),) = running.xrange(WAKE)
    assert woken == {b"ended": b"j"}


def test_an_error_comes_before_the_end(call: Call, running: redis.Redis) -> None:
    call("finish", KEYS, 3, "j", "error", "stage 2 is gone", "{}", 60_000, "", "failed")
    (_, error), (_, end) = running.xrange(OUT)
    assert error == {b"kind": b"error", b"text": b"stage 2 is gone", b"cause": b"failed"}
    assert end[b"kind"] == b"end"


def test_only_the_owner_may_and_only_once(call: Call, running: redis.Redis) -> None:
    before = snapshot(running)
    assert call("finish", KEYS, 2, "j", "length", "", "{}", 1000, "", "failed") is Code.STALE
    assert snapshot(running) == before
    call("finish", KEYS, 3, "j", "length", "", "{}", 60_000, "", "failed")
    assert call("finish", KEYS, 3, "j", "length", "", "{}", 60_000, "", "failed") is Code.STALE
    assert running.xlen(OUT) == 1
