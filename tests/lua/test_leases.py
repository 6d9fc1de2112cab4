"""claim and release."""

from __future__ import annotations

import time

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import GENERATIONS, Call

CLAIM = "t:{p}:claim:verify-1"
KEYS = [CLAIM, GENERATIONS]


def test_claim_takes_renews_and_is_held(call: Call, client: redis.Redis) -> None:
    assert call("claim", KEYS, "me", 60_000, "{}", "verify-1") is Code.OK
    client.pexpire(CLAIM, 1000)
    assert call("claim", KEYS, "me", 60_000, '{"state": "ready"}', "verify-1") is Code.OK
    assert client.pttl(CLAIM) > 50_000
    assert client.get(CLAIM) == b'me {"state": "ready"}'
    assert call("claim", KEYS, "you", 60_000, "{}", "verify-1") is Code.HELD
    assert call("claim", KEYS, "m", 60_000, "{}", "verify-1") is Code.HELD
    assert client.get(CLAIM) == b'me {"state": "ready"}'


def test_a_full_broker_renews_leases_and_grants_none(call: Call, client: redis.Redis) -> None:
    before = client.config_get("maxmemory")["maxmemory"]
    assert call("claim", KEYS, "me", 60_000, "{}", "verify-1") is Code.OK
    client.pexpire(CLAIM, 1000)
    client.config_set("maxmemory", 1)
    try:
        assert call("claim", KEYS, "me", 60_000, '{"state": "ready"}', "verify-1") is Code.OK
        assert client.pttl(CLAIM) > 50_000
        assert call("release", KEYS, "me", "verify-1", 1) is Code.OK
        assert client.hget(GENERATIONS, "left:verify-1") == client.hget(GENERATIONS, "verify-1")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            call("claim", KEYS, "me", 60_000, "{}", "verify-1")
        assert not client.exists(CLAIM)
    finally:
        client.config_set("maxmemory", str(before))


def test_release_is_for_the_holder(call: Call, client: redis.Redis) -> None:
    call("claim", KEYS, "me", 60_000, "{}", "verify-1")
    assert call("release", KEYS, "you", "verify-1", 0) is Code.HELD
    assert client.exists(CLAIM)
    assert call("release", KEYS, "me", "verify-1", 0) is Code.OK
    assert call("release", KEYS, "me", "verify-1", 0) is Code.OK
    assert not client.exists(CLAIM)


def claimed(call: Call, client: redis.Redis, token: str) -> int:
    """The role's generation after ``token`` has claimed it; the claim before has expired."""
    client.delete(CLAIM)
    assert call("claim", KEYS, token, 60_000, "{}", "verify-1") is Code.OK
    return int(client.hget(GENERATIONS, "verify-1") or 0)


def test_a_claim_by_another_raises_the_generation_and_a_late_renewal_keeps_it(
    call: Call, client: redis.Redis
) -> None:
    first, late, second, again, third = (
        claimed(call, client, token) for token in ("me", "me", "you", "you", "me")
    )
    assert first == late < second == again < third
    before = client.hgetall(GENERATIONS)
    assert call("claim", KEYS, "you", 60_000, "{}", "verify-1") is Code.HELD
    assert client.hgetall(GENERATIONS) == before


@pytest.mark.parametrize("lost", [{}, {"verify-1": "x"}, {"other": "1"}])
def test_a_generation_is_later_than_all_before_though_the_broker_lost_them(
    call: Call, client: redis.Redis, lost: dict[str, str]
) -> None:
    """A job names the generations it was assigned to: a later holder must not be taken for one."""
    before = claimed(call, client, "me")
    client.delete(GENERATIONS)
    if lost:
        client.hset(GENERATIONS, mapping=lost)
    time.sleep(0.002)
    assert claimed(call, client, "you") > before


@pytest.mark.parametrize("leaves", [1, 0])
def test_a_holder_that_leaves_is_told_from_one_that_stopped(
    call: Call, client: redis.Redis, leaves: int
) -> None:
    call("claim", KEYS, "me", 60_000, "{}", "verify-1")
    assert call("release", KEYS, "you", "verify-1", 1) is Code.HELD
    assert call("release", KEYS, "me", "verify-1", leaves) is Code.OK
    left = client.hget(GENERATIONS, "verify-1") if leaves else None
    assert client.hget(GENERATIONS, "left:verify-1") == left
