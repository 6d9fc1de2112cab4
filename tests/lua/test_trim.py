"""trim: what was read is removed and noted once; ended runs get no state again."""

from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, LOGS, RUN, Call, snapshot

OTHER = "t:{p}:other"
ENDED = "t:{p}:ended"


def message(seq: int) -> list[object]:
    return [3, 2, "d0", 2, seq, "", b"envelope", "", 0]


def test_what_was_read_makes_room(call: Call, running: redis.Redis) -> None:
    codes = [call("publish", [JOB, RUN, *LOGS], *message(seq)) for seq in (1, 2, 3)]
    assert codes == [Code.OK, Code.OK, Code.FULL]
    (first, _), (second, _) = running.xrange(LOGS[1])
    assert call("trim", [LOGS[1], RUN], second, 2, 1) is Code.OK
    assert first not in dict(running.xrange(LOGS[1]))
    assert second in dict(running.xrange(LOGS[1]))
    codes = [call("publish", [JOB, RUN, *LOGS], *message(seq)) for seq in (3, 4)]
    assert codes == [Code.OK, Code.FULL]


def test_a_repeated_trim_changes_nothing(call: Call, running: redis.Redis) -> None:
    call("publish", [JOB, RUN, *LOGS], *message(1))
    ((entry, _),) = running.xrange(LOGS[1])
    call("trim", [LOGS[1], RUN], entry, 2, 1)
    before = snapshot(running)
    assert call("trim", [LOGS[1], RUN], entry, 2, 1) is Code.OK
    assert snapshot(running) == before


def test_several_runs_are_noted_and_those_that_have_ended_are_not(
    call: Call, running: redis.Redis
) -> None:
    running.hset(RUN, "a:2", 7)
    running.hset(OTHER, "a:2", 9)
    assert call("trim", [LOGS[1], RUN, ENDED, OTHER], "0-1", 2, 5, 6, 8) is Code.OK
    assert running.hget(RUN, "r:2") == b"5"
    assert running.hget(OTHER, "r:2") == b"8"
    assert not running.exists(ENDED)
