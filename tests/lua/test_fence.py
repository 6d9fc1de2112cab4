"""The fence of every script that moves a job: the epoch, and the holder it was assigned to."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import (
    JOB,
    LOGS,
    OUT,
    RECORDING,
    REQUEST,
    RUN,
    RUNNING,
    WAKE,
    Call,
    CallList,
    snapshot,
)
from tests.lua.test_commit_verdict import verdict
from tests.lua.test_publish import message

#: By script: its keys, and its arguments from the holder that calls it.
CALLS = {
    "publish": ([JOB, RUN, *LOGS], lambda holder: message(holder=holder)),
    "commit_verdict": ([JOB, RUN, OUT, *LOGS], lambda holder: verdict(holder=holder)),
    "open_job": ([JOB, REQUEST], lambda holder: [3, 4, "[]", "flowspec", holder]),
    "finish": (
        [JOB, RUN, OUT, RECORDING, RUNNING, WAKE, REQUEST],
        lambda holder: [3, "j", "length", "", "{}", 60_000, holder],
    ),
}
ASSIGNED = " draft:12 verify-1:3 "


@pytest.fixture
def assigned(running: redis.Redis) -> redis.Redis:
    running.hset(JOB, "holders", ASSIGNED)
    return running


@pytest.mark.parametrize("script", CALLS)
@pytest.mark.parametrize(
    "holder", ["draft:11", "draft:1", "draft:2", "verify-1:12", "verify-2:3", "draft", "", " "]
)
def test_another_holder_than_the_jobs_changes_nothing(
    call: Call, assigned: redis.Redis, script: str, holder: str
) -> None:
    before = snapshot(assigned)
    keys, arguments = CALLS[script]
    assert call(script, keys, *arguments(holder)) is Code.STALE
    assert snapshot(assigned) == before


@pytest.mark.parametrize("script", CALLS)
@pytest.mark.parametrize("holder", ["draft:12", "verify-1:3"])
def test_the_jobs_holders_move_it(
    call: Call, assigned: redis.Redis, script: str, holder: str
) -> None:
    keys, arguments = CALLS[script]
    expected = Code.DUP if script == "open_job" else Code.OK
    assert call(script, keys, *arguments(holder)) is expected


@pytest.mark.parametrize(("holder", "code"), [("draft:12", Code.OK), ("draft:11", Code.STALE)])
def test_every_part_of_a_bundle_is_fenced(
    call_list: CallList, assigned: redis.Redis, holder: str, code: Code
) -> None:
    arguments = [5, "d0", 2, "", holder, 3, 1, b"one"]
    assert call_list("publish_together", (LOGS[1], JOB, RUN), *arguments) == [code]
