from __future__ import annotations

import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import RECORDING, Call


def test_a_line_is_appended_and_the_recording_lives_for_a_while(
    call: Call, client: redis.Redis
) -> None:
    assert call("record", [RECORDING], "one", 60_000) is Code.OK
    assert call("record", [RECORDING], "two", 90_000) is Code.OK
    assert [fields[b"l"] for _, fields in client.xrange(RECORDING)] == [b"one", b"two"]
    assert 60_000 < client.pttl(RECORDING) <= 90_000
