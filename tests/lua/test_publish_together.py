"""publish_together: one entry with the parts that pass, and each part's own code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, LOGS, RUN, CallList, snapshot

OTHER_JOB, OTHER_RUN = JOB.replace("job", "job2"), RUN.replace("run", "run2")
KEYS = (LOGS[1], JOB, RUN, OTHER_JOB, OTHER_RUN)
CAP = 5


@pytest.fixture
def both(running: redis.Redis) -> redis.Redis:
    """A server with a second job under epoch 7."""
    running.hset(OTHER_JOB, mapping={"state": "running", "epoch": 7})
    return running


def bundle(*parts: tuple[int, int, bytes], cap: int = CAP, stamp: str = "") -> Sequence[object]:
    return [cap, "d0", 2, stamp, "", *(field for part in parts for field in part)]


def only_entry(client: redis.Redis) -> list[bytes]:
    """Names and values of the log's only entry, in their order."""
    read = "return redis.call('XRANGE', KEYS[1], '-', '+')"
    ((_, fields),) = client.eval(read, 1, LOGS[1])  # type: ignore[misc]
    return list(fields)


def test_all_parts_are_one_entry_and_each_is_counted_for_its_run(
    call_list: CallList, both: redis.Redis
) -> None:
    arguments = bundle((3, 4, b"one"), (7, 1, b"other"))
    assert call_list("publish_together", KEYS, *arguments) == [Code.OK, Code.OK]
    assert only_entry(both) == [b"f", b"d0", b"q", b"4", b"m", b"one", b"q", b"1", b"m", b"other"]
    assert both.hgetall(RUN) == {b"q:d0:2": b"4", b"a:2": b"1"}
    assert both.hgetall(OTHER_RUN) == {b"q:d0:2": b"1", b"a:2": b"1"}


def test_a_stamp_stands_before_the_parts(call_list: CallList, both: redis.Redis) -> None:
    arguments = bundle((3, 1, b"one"), (7, 1, b"other"), stamp="0.5 d0")
    call_list("publish_together", KEYS, *arguments)
    assert only_entry(both)[:4] == [b"f", b"d0", b"t", b"0.5 d0"]


@pytest.mark.parametrize(
    ("part", "code"),
    [((2, 9, b"old"), Code.STALE), ((8, 9, b"new"), Code.STALE), ((7, 1, b"again"), Code.DUP)],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_does_not_pass_is_left_out_alone(
    call_list: CallList, both: redis.Redis, part: tuple[int, int, bytes], code: Code, first: bool
) -> None:
    call_list("publish_together", (LOGS[1], OTHER_JOB, OTHER_RUN), *bundle((7, 1, b"before")))
    before = both.hgetall(OTHER_RUN)
    parts = ((3, 1, b"sound"), part)
    keys = KEYS
    if first:
        parts, keys = parts[::-1], (LOGS[1], OTHER_JOB, OTHER_RUN, JOB, RUN)
    codes = call_list("publish_together", keys, *bundle(*parts))
    assert codes == ([code, Code.OK] if first else [Code.OK, code])
    assert both.hgetall(OTHER_RUN) == before
    *_, (_, fields) = both.xrange(LOGS[1])
    assert fields == {b"f": b"d0", b"q": b"1", b"m": b"sound"}


def test_a_run_with_too_many_entries_is_full_alone(call_list: CallList, both: redis.Redis) -> None:
    both.hset(OTHER_RUN, "a:2", CAP)
    codes = call_list("publish_together", KEYS, *bundle((3, 1, b"one"), (7, 1, b"other")))
    assert codes == [Code.OK, Code.FULL]


def test_nothing_is_written_if_no_part_passes(call_list: CallList, both: redis.Redis) -> None:
    before = snapshot(both)
    arguments = bundle((2, 1, b"one"), (7, 0, b"other"))
    assert call_list("publish_together", KEYS, *arguments) == [Code.STALE, Code.DUP]
    assert snapshot(both) == before


def test_a_repeated_call_writes_nothing(call_list: CallList, both: redis.Redis) -> None:
    arguments = bundle((3, 1, b"one"), (7, 1, b"other"))
    call_list("publish_together", KEYS, *arguments)
    before = snapshot(both)
    assert call_list("publish_together", KEYS, *arguments) == [Code.DUP, Code.DUP]
    assert snapshot(both) == before
