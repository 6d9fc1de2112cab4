"""claim and release."""

from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import Call

CLAIM = "t:{p}:claim:verify-1"


def test_claim_takes_renews_and_is_held(call: Call, client: redis.Redis) -> None:
    assert call("claim", [CLAIM], "me", 60_000, "{}") is Code.OK
    client.pexpire(CLAIM, 1000)
    assert call("claim", [CLAIM], "me", 60_000, '{"state": "ready"}') is Code.OK
    assert client.pttl(CLAIM) > 50_000
    assert client.get(CLAIM) == b'me {"state": "ready"}'
    assert call("claim", [CLAIM], "you", 60_000, "{}") is Code.HELD
    assert call("claim", [CLAIM], "m", 60_000, "{}") is Code.HELD
    assert client.get(CLAIM) == b'me {"state": "ready"}'


def test_release_is_for_the_holder(call: Call, client: redis.Redis) -> None:
    call("claim", [CLAIM], "me", 60_000, "{}")
    assert call("release", [CLAIM], "you") is Code.HELD
    assert client.exists(CLAIM)
    assert call("release", [CLAIM], "me") is Code.OK
    assert call("release", [CLAIM], "me") is Code.OK
    assert not client.exists(CLAIM)
