"""admit: queueing, refusing and recognising submissions."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, OUT, QUEUE, REQUEST, WAKE, Call, snapshot

IDEMPOTENCY = "t:{p}:idempotency"
KEYS = [JOB, QUEUE, OUT, IDEMPOTENCY, WAKE, JOB, REQUEST]


def test_ok_queues_the_job_with_its_fields(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 10, 1000, "", "", "", "prompt", "hello", "seed", "3") is Code.OK
    assert client.lrange(QUEUE, 0, -1) == [b"j"]
    assert client.hgetall(JOB) == {b"state": b"queued", b"epoch": b"0"}
    assert client.hgetall(REQUEST) == {b"f:prompt": b"hello", b"f:seed": b"3"}
    assert client.ttl(JOB) == client.ttl(REQUEST) == -1, "a waiting job does not expire"
    ((_, woken),) = client.xrange(WAKE)
    assert woken == {b"admitted": b"j"}


def test_redelivery_is_dup_and_writes_nothing(call: Call, client: redis.Redis) -> None:
    call("admit", KEYS, "j", 10, 1000, "", "", "")
    before = snapshot(client)
    assert call("admit", KEYS, "j", 10, 1000, "", "", "") is Code.DUP
    assert call("admit", KEYS, "j", 10, 1000, "", "now it is wrong", "") is Code.DUP
    assert snapshot(client) == before


def test_a_refused_job_is_answered_and_expires(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 10, 60_000, "", "no such strategy", "") is Code.OK
    assert [fields[b"kind"] for _, fields in client.xrange(OUT)] == [b"error", b"end"]
    assert client.llen(QUEUE) == 0
    assert 0 < client.pttl(OUT) <= 60_000
    assert 0 < client.pttl(JOB) <= 60_000


def test_a_full_queue_is_said(call: Call, client: redis.Redis) -> None:
    client.rpush(QUEUE, "a", "b")
    assert call("admit", KEYS, "j", 2, 1000, "", "", "") is Code.FULL
    said = client.xrange(OUT)[0][1]
    assert b"the queue is full: 2 jobs" in said[b"text"]
    assert said[b"cause"] == b"full"
    assert client.llen(QUEUE) == 2


OTHER = ["t:{p}:job2", QUEUE, "t:{p}:out2", IDEMPOTENCY, WAKE, JOB, "t:{p}:request2"]


def test_an_idempotency_key_is_taken_once(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 9, 60_000, "abc", "", "") is Code.OK
    assert client.get(IDEMPOTENCY) == b"j abc"
    assert call("admit", OTHER, "k", 9, 60_000, "abc", "", "j abc") is Code.DUP
    assert client.xrange("t:{p}:out2")[0][1][b"duplicate_of"] == b"j"
    assert client.lrange(QUEUE, 0, -1) == [b"j"]


def test_an_idempotency_key_with_other_fields_is_refused(call: Call, client: redis.Redis) -> None:
    assert call("admit", KEYS, "j", 9, 60_000, "abc", "", "") is Code.OK
    assert call("admit", OTHER, "k", 9, 60_000, "abd", "", "j abc") is Code.DUP
    said = client.xrange("t:{p}:out2")[0][1]
    assert said == {
        b"kind": b"error",
        b"text": b"the idempotency key belongs to job j with other fields; use another key",
        b"cause": b"refused",
    }
    assert client.lrange(QUEUE, 0, -1) == [b"j"]
    assert client.get(IDEMPOTENCY) == b"j abc"


@pytest.mark.parametrize("how", ["failed", "gone", "of another type"])
def test_a_job_that_has_failed_loses_its_idempotency_key(
    call: Call, client: redis.Redis, how: str
) -> None:
    assert call("admit", KEYS, "j", 9, 60_000, "abc", "", "") is Code.OK
    if how == "failed":
        client.hset(JOB, mapping={"state": "done", "finish_reason": "error"})
    else:
        client.delete(JOB)
    if how == "of another type":
        client.set(JOB, "text")
    assert call("admit", OTHER, "k", 9, 60_000, "abd", "", "j abc") is Code.OK
    assert client.get(IDEMPOTENCY) == b"k abd"
    assert client.lrange(QUEUE, 0, -1) == [b"j", b"k"]


def test_a_key_that_has_just_got_another_owner_is_looked_at_again(
    call: Call, client: redis.Redis
) -> None:
    client.set(IDEMPOTENCY, "j abc")
    before = snapshot(client)
    for read in ("", "i abc"):
        assert call("admit", OTHER, "k", 9, 60_000, "abc", "", read) is Code.STALE
    assert snapshot(client) == before


def test_a_key_of_another_type_is_replaced(call: Call, client: redis.Redis) -> None:
    client.rpush(IDEMPOTENCY, "text")
    assert call("admit", KEYS, "j", 9, 60_000, "abc", "", "") is Code.OK
    assert client.get(IDEMPOTENCY) == b"j abc"
