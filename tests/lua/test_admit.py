"""admit: queueing, refusing and recognising submissions."""

from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, OUT, QUEUE, WAKE, Call, snapshot

IDEMPOTENCY = "t:{p}:idempotency"
KEYS = [JOB, QUEUE, OUT, IDEMPOTENCY, WAKE]


def test_ok_queues_the_job_with_its_fields(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 10, 1000, 0, "", "prompt", "hello", "seed", "3") is Code.OK
    assert client.lrange(QUEUE, 0, -1) == [b"j"]
    assert client.hgetall(JOB) == {
        b"state": b"queued",
        b"epoch": b"0",
        b"f:prompt": b"hello",
        b"f:seed": b"3",
    }
    assert client.ttl(JOB) == -1, "a waiting job does not expire"
    ((_, woken),) = client.xrange(WAKE)
    assert woken == {b"admitted": b"j"}


def test_redelivery_is_dup_and_writes_nothing(call: Call, client: redis.Redis) -> None:
    call("admit", KEYS, "j", 10, 1000, 0, "")
    before = snapshot(client)
    assert call("admit", KEYS, "j", 10, 1000, 0, "") is Code.DUP
    assert call("admit", KEYS, "j", 10, 1000, 0, "now it is wrong") is Code.DUP
    assert snapshot(client) == before


def test_a_refused_job_is_answered_and_expires(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 10, 60_000, 0, "no such strategy") is Code.OK
    assert [fields[b"kind"] for _, fields in client.xrange(OUT)] == [b"error", b"end"]
    assert client.llen(QUEUE) == 0
    assert 0 < client.pttl(OUT) <= 60_000
    assert 0 < client.pttl(JOB) <= 60_000


def test_a_full_queue_is_said(call: Call, client: redis.Redis) -> None:
    client.rpush(QUEUE, "a", "b")
    assert call("admit", KEYS, "j", 2, 1000, 0, "") is Code.FULL
    said = client.xrange(OUT)[0][1]
    assert b"the queue is full: 2 jobs" in said[b"text"]
    assert said[b"cause"] == b"full"
    assert client.llen(QUEUE) == 2


def test_an_idempotency_key_is_taken_once(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 9, 60_000, 1, "") is Code.OK
    assert client.get(IDEMPOTENCY) == b"j"
    other = ["t:{p}:job2", QUEUE, "t:{p}:out2", IDEMPOTENCY, WAKE]
    assert call("admit", other, "k", 9, 60_000, 1, "") is Code.DUP
    assert client.xrange("t:{p}:out2")[0][1][b"duplicate_of"] == b"j"
    assert client.lrange(QUEUE, 0, -1) == [b"j"]
