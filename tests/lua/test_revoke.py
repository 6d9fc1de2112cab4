"""revoke: ends a job from outside, fences its owners and notifies them."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import (
    CLAIM,
    GENERATIONS,
    JOB,
    LOGS,
    OUT,
    QUEUE,
    RECORDING,
    REQUEST,
    RUN,
    RUNNING,
    WAKE,
    Call,
    snapshot,
)
from tests.lua.test_commit_verdict import verdict

KEYS = [JOB, RUN, OUT, RECORDING, RUNNING, QUEUE, WAKE, GENERATIONS, CLAIM, REQUEST, *LOGS]


def test_ok_raises_the_epoch_and_tells_every_worker(call: Call, running: redis.Redis) -> None:
    running.hset(RUN, "q:d0:2", 1)
    running.hset(REQUEST, "f:prompt", "hello")
    assert (
        call(
            "revoke",
            KEYS,
            "j",
            3,
            "error",
            "a worker was lost",
            60_000,
            b"revoke",
            "lost",
            "",
            "",
            0,
        )
        is Code.OK
    )
    assert running.hmget(JOB, "epoch", "state") == [b"4", b"done"]
    assert [running.xrange(log)[0][1][b"m"] for log in LOGS] == [b"revoke"] * 3
    assert [fields[b"kind"] for _, fields in running.xrange(OUT)] == [b"error", b"end"]
    assert running.smembers(RUNNING) == set()
    assert running.exists(RUN) == 0
    ((_, woken),) = running.xrange(WAKE)
    assert woken == {b"ended": b"j"}
    assert all(0 < running.pttl(key) <= 60_000 for key in (JOB, OUT, REQUEST))
    publish = [JOB, RUN, *LOGS]
    assert call("publish", publish, 3, 9, "d0", 2, 1, "", b"late", "", "", 0) is Code.STALE


def test_a_waiting_job_leaves_the_queue_and_nobody_is_told(call: Call, client: redis.Redis) -> None:
    client.hset(JOB, mapping={"state": "queued", "epoch": 0})
    client.rpush(QUEUE, "i", "j")
    assert (
        call("revoke", KEYS, "j", 0, "cancelled", "", 60_000, b"revoke", "lost", "", "", 0)
        is Code.OK
    )
    assert client.lrange(QUEUE, 0, -1) == [b"i"]
    assert all(client.xlen(log) == 0 for log in LOGS)
    assert [fields[b"kind"] for _, fields in client.xrange(OUT)] == [b"end"]
    ((_, woken),) = client.xrange(WAKE)
    assert woken == {b"ended": b"j"}


@pytest.mark.parametrize("was", ["deleted", "another type"])
@pytest.mark.parametrize("place", [RUNNING, QUEUE])
def test_a_job_without_its_hash_leaves_its_place(
    call: Call, running: redis.Redis, was: str, place: str
) -> None:
    running.delete(JOB)
    running.hset(REQUEST, "f:prompt", "hello")
    if was == "another type":
        running.set(JOB, "text")
    if place == QUEUE:
        running.delete(RUNNING)
        running.rpush(QUEUE, "i", "j")
    end = ("revoke", KEYS, "j", 0, "error", "", 60_000, b"revoke", "lost", "", "", 2)
    assert call(*end) is Code.OK
    assert running.smembers(RUNNING) == set()
    assert running.lrange(QUEUE, 0, -1) == ([b"i"] if place == QUEUE else [])
    assert running.exists(JOB, REQUEST) == 0
    (_, error), (_, last) = running.xrange(OUT)
    assert error[b"text"].startswith(b"the record of the job was deleted")
    assert (error[b"cause"], last[b"finish_reason"]) == (b"lost", b"error")
    assert 0 < running.pttl(OUT) <= 60_000
    assert [running.xrange(log)[0][1][b"m"] for log in LOGS] == [b"revoke"] * 3
    assert call(*end) is Code.DUP


def test_repeating_it_is_dup_and_another_epoch_is_stale(call: Call, running: redis.Redis) -> None:
    before = snapshot(running)
    assert (
        call("revoke", KEYS, "j", 2, "cancelled", "", 1000, b"revoke", "lost", "", "", 0)
        is Code.STALE
    )
    assert snapshot(running) == before
    call("revoke", KEYS, "j", 3, "cancelled", "", 60_000, b"revoke", "lost", "", "", 0)
    assert (
        call("revoke", KEYS, "j", 3, "cancelled", "", 60_000, b"revoke", "lost", "", "", 0)
        is Code.DUP
    )
    assert running.xlen(OUT) == 1


def test_a_job_nobody_knows_is_dup(call: Call, client: redis.Redis) -> None:
    assert (
        call("revoke", KEYS, "j", 0, "cancelled", "", 1000, b"revoke", "lost", "", "", 0)
        is Code.DUP
    )
    assert snapshot(client) == {}


def test_a_worker_that_is_there_is_not_lost(call: Call, running: redis.Redis) -> None:
    """A scheduler that was paused decides by leases of long ago."""
    running.hset(GENERATIONS, mapping={"verify-2": 3, "scheduler": 4})
    running.set(CLAIM, "token {}")
    why = ("j", 3, "error", "a worker was lost", 60_000, b"revoke", "lost")
    before = snapshot(running)
    assert call("revoke", KEYS, *why, "scheduler:4", "verify-2:3", 0) is Code.STALE
    assert call("revoke", KEYS, *why, "scheduler:3", "verify-2:2", 0) is Code.STALE
    assert snapshot(running) == before
    assert call("revoke", KEYS, *why, "scheduler:4", "verify-2:2", 0) is Code.OK, "it was replaced"


def test_a_worker_whose_lease_has_expired_is_lost(call: Call, running: redis.Redis) -> None:
    running.hset(GENERATIONS, mapping={"verify-2": 3})
    why = ("j", 3, "error", "a worker was lost", 60_000, b"revoke", "lost")
    assert call("revoke", KEYS, *why, "", "verify-2:3", 0) is Code.OK


WHY = ("error", "a worker was lost", 60_000, b"revoke", "lost", "", "verify-2:3")


def put_back(call: Call, epoch: int, most: int = 2) -> Code:
    return call("revoke", KEYS, "j", epoch, *WHY, most)


def test_a_job_is_put_back_in_front_of_the_queue(call: Call, running: redis.Redis) -> None:
    running.rpush(QUEUE, "k")
    running.hset(RUN, "q:d0:2", 1)
    running.xadd(OUT, {"kind": "tokens"})
    assert put_back(call, 3) is Code.OK
    assert running.hmget(JOB, "epoch", "state", "again", "offset") == [b"4", b"queued", b"1", b"5"]
    assert running.lrange(QUEUE, 0, -1) == [b"j", b"k"]
    assert running.smembers(RUNNING) == set()
    assert running.exists(RUN) == 0
    assert [running.xrange(log)[0][1][b"m"] for log in LOGS] == [b"revoke"] * 3
    assert running.xlen(OUT) == 1, "nothing is said in its output"
    assert running.pttl(JOB) == running.pttl(OUT) == -1
    ((_, woken),) = running.xrange(WAKE)
    assert woken == {b"admitted": b"j"}


@pytest.mark.parametrize(("left", "runs"), [(None, 3), ("3", 5), ("2", 3)])
def test_it_ends_once_it_was_put_back_too_often(
    call: Call, running: redis.Redis, left: str | None, runs: int
) -> None:
    """A worker that has left its role on purpose, as in a rolling restart, does not count."""
    if left is not None:
        running.hset(GENERATIONS, "left:verify-2", left)
    states = []
    for at in range(runs):
        assert put_back(call, 3 + at) is Code.OK
        states.append(running.hget(JOB, "state"))
        if states[-1] == b"queued":
            running.lpop(QUEUE)
            running.hset(JOB, "state", "running")
    assert states == [b"queued"] * (runs - 1) + [b"queued" if left == "3" else b"done"]


def test_a_job_whose_text_is_complete_ends_with_it(call: Call, running: redis.Redis) -> None:
    assert call("commit_verdict", [JOB, RUN, OUT, *LOGS], *verdict(finish="eos")) is Code.OK
    assert put_back(call, 3) is Code.OK
    assert running.hmget(JOB, "state", "finish_reason") == [b"done", b"eos"]
    kinds = [fields[b"kind"] for _, fields in running.xrange(OUT)]
    assert kinds == [b"tokens", b"end"]
    assert running.llen(QUEUE) == 0
