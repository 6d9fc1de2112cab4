"""trim: what was read is removed and noted once; ended runs get no state again."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import GENERATIONS, JOB, LOGS, RUN, Call, snapshot

OTHER = "t:{p}:other"
ENDED = "t:{p}:ended"


def message(seq: int) -> list[object]:
    return [3, 2, "d0", 2, seq, "", b"envelope", "", "", 0]


def test_what_was_read_makes_room(call: Call, running: redis.Redis) -> None:
    codes = [call("publish", [JOB, RUN, *LOGS], *message(seq)) for seq in (1, 2, 3)]
    assert codes == [Code.OK, Code.OK, Code.FULL]
    (first, _), (second, _) = running.xrange(LOGS[1])
    assert call("trim", [LOGS[1], GENERATIONS, RUN], second, 2, "", 1) is Code.OK
    assert first not in dict(running.xrange(LOGS[1]))
    assert second in dict(running.xrange(LOGS[1]))
    codes = [call("publish", [JOB, RUN, *LOGS], *message(seq)) for seq in (3, 4)]
    assert codes == [Code.OK, Code.FULL]


def test_a_repeated_trim_changes_nothing(call: Call, running: redis.Redis) -> None:
    call("publish", [JOB, RUN, *LOGS], *message(1))
    ((entry, _),) = running.xrange(LOGS[1])
    call("trim", [LOGS[1], GENERATIONS, RUN], entry, 2, "", 1)
    before = snapshot(running)
    assert call("trim", [LOGS[1], GENERATIONS, RUN], entry, 2, "", 1) is Code.OK
    assert snapshot(running) == before


def test_several_runs_are_noted_and_those_that_have_ended_are_not(
    call: Call, running: redis.Redis
) -> None:
    running.hset(RUN, "a:2", 7)
    running.hset(OTHER, "a:2", 9)
    assert call("trim", [LOGS[1], GENERATIONS, RUN, ENDED, OTHER], "0-1", 2, "", 5, 6, 8) is Code.OK
    assert running.hget(RUN, "r:2") == b"5"
    assert running.hget(OTHER, "r:2") == b"8"
    assert not running.exists(ENDED)


@pytest.mark.parametrize(("generation", "code"), [(4, Code.OK), (3, Code.STALE)])
def test_a_worker_that_was_replaced_removes_nothing(
    call: Call, running: redis.Redis, generation: int, code: Code
) -> None:
    """It reads the log of its successor, which has not read it yet."""
    running.hset(GENERATIONS, "verify-1", 4)
    call("publish", [JOB, RUN, *LOGS], *message(1))
    before = snapshot(running)
    arguments = ("9999999999999-0", 2, f"verify-1:{generation}", 1)
    assert call("trim", [LOGS[1], GENERATIONS, RUN], *arguments) is code
    assert (snapshot(running) == before) == (code is Code.STALE)
