"""commit_verdict: all or nothing, each answer, redelivery."""

from __future__ import annotations

import json

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, LOGS, OUT, RUN, Call, snapshot

KEYS = [JOB, RUN, OUT, *LOGS]


def verdict(
    offset: int = 5,
    *,
    epoch: int = 3,
    cap: int = 5,
    seqs: tuple[int, int] = (1, 1),
    finish: str = "",
    completes: tuple[str, ...] = (),
    stamp: str = "",
    holder: str = "",
    logprobs: str = "",
) -> list[object]:
    return [
        epoch,
        cap,
        offset,
        2,
        0,
        2,
        json.dumps([7, 8]),
        "text",
        "[3,1]",
        finish,
        b"prune",
        stamp,
        len(seqs),
        holder,
        logprobs,
        *seqs,
        *completes,
    ]


def test_ok_moves_everything_at_once(call: Call, running: redis.Redis) -> None:
    assert call("commit_verdict", KEYS, *verdict(finish="eos")) is Code.OK
    for log in LOGS[1:]:
        ((_, fields),) = running.xrange(log)
        assert fields == {b"f": b"d0", b"q": b"1", b"m": b"prune"}
    assert running.xlen(LOGS[0]) == 0, "the draft worker needs no prune"
    ((_, entry),) = running.xrange(OUT)
    assert entry == {
        b"kind": b"tokens",
        b"offset": b"0",
        b"ids": b"[7, 8]",
        b"text": b"text",
        b"sizes": b"[3,1]",
        b"finish_reason": b"eos",
    }
    assert running.hmget(JOB, "offset", "emitted") == [b"7", b"2"]
    counts = {b"q:d0:2": b"1", b"q:d0:3": b"1", b"a:2": b"1", b"a:3": b"1"}
    assert running.hgetall(RUN) == counts


def test_redelivery_is_dup_and_writes_nothing(call: Call, running: redis.Redis) -> None:
    call("commit_verdict", KEYS, *verdict())
    before = snapshot(running)
    assert call("commit_verdict", KEYS, *verdict()) is Code.DUP
    assert snapshot(running) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (verdict(6), Code.GAP),
        (verdict(seqs=(1, 0)), Code.GAP),
        (verdict(epoch=2), Code.STALE),
        (verdict(cap=0), Code.FULL),
    ],
)
def test_refusals_change_nothing(
    call: Call, running: redis.Redis, arguments: list[object], code: Code
) -> None:
    before = snapshot(running)
    assert call("commit_verdict", KEYS, *arguments, "task") is code
    assert snapshot(running) == before


@pytest.mark.parametrize("log", [2, 3])
def test_one_full_log_refuses_the_whole_commit(call: Call, running: redis.Redis, log: int) -> None:
    running.hset(RUN, mapping={f"a:{log}": 9, f"r:{log}": 4})
    before = snapshot(running)
    assert call("commit_verdict", KEYS, *verdict()) is Code.FULL
    assert snapshot(running) == before
    running.hset(RUN, f"r:{log}", 5)
    assert call("commit_verdict", KEYS, *verdict()) is Code.OK


def test_a_full_output_refuses_the_whole_commit(call: Call, running: redis.Redis) -> None:
    for _ in range(5):
        running.xadd(OUT, {"x": 1})
    before = snapshot(running)
    assert call("commit_verdict", KEYS, *verdict()) is Code.FULL
    assert snapshot(running) == before


def test_other_runs_entries_fill_no_log(call: Call, running: redis.Redis) -> None:
    for _ in range(9):
        running.xadd(LOGS[2], {"x": 1})
    assert call("commit_verdict", KEYS, *verdict()) is Code.OK


def test_released_tasks_come_behind_the_prune(call: Call, running: redis.Redis) -> None:
    call("publish", [JOB, RUN, *LOGS], 3, 9, "d0", 2, 0, "next", b"held", "", "", 1, "verdict/0")
    assert call("commit_verdict", KEYS, *verdict(completes=("verdict/0",))) is Code.OK
    assert [fields[b"m"] for _, fields in running.xrange(LOGS[1])] == [b"prune", b"held"]


def test_a_script_that_fails_midway_cannot_be(call: Call, running: redis.Redis) -> None:
    """The checks refuse a key of the wrong type before the first write."""
    running.delete(OUT)
    running.set(OUT, "not a stream")
    before = snapshot(running)
    with pytest.raises(redis.ResponseError):
        call("commit_verdict", KEYS, *verdict())
    assert snapshot(running) == before


def test_a_stamp_reaches_every_prune_and_the_output(call: Call, running: redis.Redis) -> None:
    assert call("commit_verdict", KEYS, *verdict(finish="eos", stamp="0.25 d0")) is Code.OK
    for log in LOGS[1:]:
        ((_, fields),) = running.xrange(log)
        assert fields[b"t"] == b"0.25 d0"
    ((_, entry),) = running.xrange(OUT)
    assert (entry[b"at"], entry[b"finish_reason"]) == (b"0.25", b"eos")


def test_log_probabilities_go_with_the_tokens(call: Call, running: redis.Redis) -> None:
    """They stand in the entry only if the job asked for them."""
    assert call("commit_verdict", KEYS, *verdict(logprobs="[[1]]", stamp="0.25 d0")) is Code.OK
    ((_, entry),) = running.xrange(OUT)
    assert entry[b"logprobs"] == b"[[1]]"
    assert (entry[b"ids"], entry[b"at"]) == (b"[7, 8]", b"0.25")


def test_a_commit_prolongs_the_lifetime_of_the_run(call: Call, running: redis.Redis) -> None:
    assert call("commit_verdict", KEYS, *verdict()) is Code.OK
    running.pexpire(RUN, 1_000)
    assert call("commit_verdict", KEYS, *verdict(offset=7, seqs=(2, 2))) is Code.OK
    assert running.pttl(RUN) > 1_000
