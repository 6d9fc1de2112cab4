"""publish: each code, and that refused calls change nothing."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, LOGS, RUN, Call, snapshot

KEYS = [JOB, RUN, *LOGS]
CAP = 5


def message(
    seq: int = 1,
    *,
    epoch: int = 3,
    index: int = 2,
    sender: str = "d0",
    cap: int = CAP,
    stamp: str = "",
    holder: str = "",
) -> list[object]:
    return [epoch, cap, sender, index, seq, "", b"envelope", stamp, holder, 0]


def task(name: str, *after: str, completes: tuple[str, ...] = (), stamp: str = "") -> list[object]:
    return [
        3,
        CAP,
        "s1",
        3,
        0,
        name,
        b"envelope of " + name.encode(),
        stamp,
        "",
        len(after),
        *after,
        *completes,
    ]


def test_ok_writes_envelope_and_counter_together(call: Call, running: redis.Redis) -> None:
    assert call("publish", KEYS, *message()) is Code.OK
    ((_, fields),) = running.xrange(LOGS[1])
    assert fields == {b"f": b"d0", b"q": b"1", b"m": b"envelope"}
    assert running.hgetall(RUN) == {b"q:d0:2": b"1", b"a:2": b"1"}


def test_redelivery_is_dup_and_writes_nothing(call: Call, running: redis.Redis) -> None:
    call("publish", KEYS, *message())
    before = snapshot(running)
    assert call("publish", KEYS, *message()) is Code.DUP
    assert snapshot(running) == before


def test_a_redelivered_message_still_completes_its_tasks(call: Call, running: redis.Redis) -> None:
    call("publish", KEYS, *message())
    call("publish", KEYS, *task("held", "done"))
    assert call("publish", KEYS, *message(), "done") is Code.DUP
    assert running.xlen(LOGS[2]) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (message(epoch=2), Code.STALE),
        (message(epoch=4), Code.STALE),
        (message(cap=0), Code.FULL),
    ],
)
def test_refusals_change_nothing(
    call: Call, running: redis.Redis, arguments: list[object], code: Code
) -> None:
    before = snapshot(running)
    assert call("publish", KEYS, *arguments, "some-task") is code
    assert snapshot(running) == before


@pytest.mark.parametrize("state", ["queued", "done"])
def test_only_a_running_job_is_written_for(call: Call, running: redis.Redis, state: str) -> None:
    running.hset(JOB, "state", state)
    assert call("publish", KEYS, *message()) is Code.STALE


def test_a_job_nobody_knows_is_stale(call: Call, client: redis.Redis) -> None:
    assert call("publish", KEYS, *message()) is Code.STALE
    assert snapshot(client) == {}


def test_senders_and_receivers_are_counted_apart(call: Call, running: redis.Redis) -> None:
    assert call("publish", KEYS, *message(sender="s1")) is Code.OK
    assert call("publish", KEYS, *message(index=3)) is Code.OK
    assert call("publish", KEYS, *message()) is Code.OK


def test_a_task_is_held_released_once_and_numbered_by_the_graph(
    call: Call, running: redis.Redis
) -> None:
    assert call("publish", KEYS, *task("b", "a")) is Code.OK
    assert call("publish", KEYS, *task("b", "a")) is Code.DUP
    assert running.xlen(LOGS[2]) == 0
    assert call("publish", KEYS, 3, CAP, "s1", 0, 0, "", "", "", "", 0, "a") is Code.OK
    assert call("publish", KEYS, 3, CAP, "s1", 0, 0, "", "", "", "", 0, "a") is Code.OK
    ((_, fields),) = running.xrange(LOGS[2])
    assert fields == {b"f": b"graph", b"q": b"1", b"m": b"envelope of b"}


def test_a_released_task_leaves_only_marks_and_its_number_behind(
    call: Call, running: redis.Redis
) -> None:
    call("publish", KEYS, *task("b", "a"))
    call("publish", KEYS, *task("c", completes=("a",)))
    assert set(running.hkeys(RUN)) == {b"s:b", b"s:c", b"d:a", b"q:graph:3", b"a:3"}


def test_a_stamp_is_one_more_field_and_its_latest_is_kept(call: Call, running: redis.Redis) -> None:
    assert call("publish", KEYS, *message(stamp="1.5 d0")) is Code.OK
    ((_, fields),) = running.xrange(LOGS[1])
    assert fields[b"t"] == b"1.5 d0"
    call("publish", KEYS, *task("b", "a", stamp="2.5 s1"))
    assert running.hget(RUN, "m:b") == b"2.5 s1"
    call("publish", KEYS, *task("c", completes=("a",), stamp="10 s2"))
    assert [entry[b"t"] for _, entry in running.xrange(LOGS[2])] == [b"10 s2", b"10 s2"]
    assert not running.hexists(RUN, "m:b")


def test_a_run_has_a_lifetime_from_its_first_entry_on(call: Call, running: redis.Redis) -> None:
    """For who ends a job whose record is gone does not know its run's key."""
    for reach in (lambda: task("t"), message):
        running.delete(RUN)
        assert call("publish", KEYS, *reach()) is Code.OK
        assert 0 < running.pttl(RUN) <= 86_400_000
    running.persist(RUN)
    assert call("publish", KEYS, *message(seq=2)) is Code.OK
    assert running.pttl(RUN) == -1, "not at every entry"
