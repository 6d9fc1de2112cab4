"""assign: a waiting job, under a new epoch, while there is room."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import GENERATIONS, JOB, QUEUE, RUNNING, SUBMISSIONS, Call, snapshot

KEYS = [JOB, QUEUE, RUNNING, SUBMISSIONS, GENERATIONS]
HOLDERS = " draft:2 verify-1:1 "


@pytest.fixture
def waiting(client: redis.Redis) -> redis.Redis:
    client.rpush(QUEUE, "j", "k")
    client.hset(JOB, mapping={"state": "queued", "epoch": 2})
    client.hset(GENERATIONS, mapping={"draft": 2, "verify-1": 1, "scheduler": 4})
    return client


def test_ok_raises_the_epoch_and_tells_the_draft_worker(call: Call, waiting: redis.Redis) -> None:
    assert call("assign", KEYS, "j", 1, 3, b"submit", HOLDERS, "") is Code.OK
    assert waiting.hgetall(JOB) == {
        b"state": b"running",
        b"epoch": b"3",
        b"holders": HOLDERS.encode(),
    }
    assert waiting.lrange(QUEUE, 0, -1) == [b"k"]
    assert waiting.smembers(RUNNING) == {b"j"}
    ((_, fields),) = waiting.xrange(SUBMISSIONS)
    assert fields == {b"f": b"scheduler", b"q": b"1", b"m": b"submit"}


def test_a_job_behind_others_may_be_assigned_before_them(call: Call, waiting: redis.Redis) -> None:
    waiting.lpush(QUEUE, "i")
    assert call("assign", KEYS, "j", 1, 3, b"submit", HOLDERS, "") is Code.OK
    assert waiting.lrange(QUEUE, 0, -1) == [b"i", b"k"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("x", 1, 3), Code.GAP),
        (("j", 1, 2), Code.STALE),
        (("j", 1, 4), Code.STALE),
        (("j", 0, 3), Code.FULL),
    ],
)
def test_refusals_change_nothing(
    call: Call, waiting: redis.Redis, arguments: tuple[object, ...], code: Code
) -> None:
    before = snapshot(waiting)
    assert call("assign", KEYS, *arguments, b"submit", HOLDERS, "") is code
    assert snapshot(waiting) == before


def test_assigning_twice_is_refused(call: Call, waiting: redis.Redis) -> None:
    call("assign", KEYS, "j", 5, 3, b"submit", HOLDERS, "")
    assert call("assign", KEYS, "j", 5, 3, b"submit", HOLDERS, "") is Code.GAP
    assert waiting.xlen(SUBMISSIONS) == 1


@pytest.mark.parametrize(
    ("holders", "scheduler"),
    [(" draft:1 verify-1:1 ", ""), (" draft:2 verify-1:2 ", ""), (HOLDERS, "scheduler:3")],
)
def test_only_the_latest_holders_are_assigned_a_job_by_the_latest_scheduler(
    call: Call, waiting: redis.Redis, holders: str, scheduler: str
) -> None:
    before = snapshot(waiting)
    assert call("assign", KEYS, "j", 1, 3, b"submit", holders, scheduler) is Code.STALE
    assert snapshot(waiting) == before
    assert call("assign", KEYS, "j", 1, 3, b"submit", HOLDERS, "scheduler:4") is Code.OK
