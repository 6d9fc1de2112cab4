from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import JOB, REQUEST, Call, snapshot


def test_ok_once_then_dup(call: Call, client: redis.Redis) -> None:
    client.hset(JOB, mapping={"state": "running", "epoch": 1})
    assert call("open_job", [JOB, REQUEST], 1, 4, "[1, 2, 3, 4, 5]", "flowspec", "") is Code.OK
    assert client.hmget(JOB, "offset", "emitted", "strategy") == [b"4", b"0", b"flowspec"]
    assert client.hgetall(REQUEST) == {b"prompt_token_ids": b"[1, 2, 3, 4, 5]"}
    before = snapshot(client)
    assert call("open_job", [JOB, REQUEST], 1, 9, "[]", "other", "") is Code.DUP
    assert snapshot(client) == before


def test_another_epoch_is_stale(call: Call, running: redis.Redis) -> None:
    assert call("open_job", [JOB, REQUEST], 2, 4, "[]", "flowspec", "") is Code.STALE
