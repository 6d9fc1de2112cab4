"""drop_mistyped: only keys of a wrong type are deleted."""

from __future__ import annotations

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import Call, snapshot

MAKE = {
    "string": lambda client, key: client.set(key, "x"),
    "hash": lambda client, key: client.hset(key, "a", "x"),
    "list": lambda client, key: client.rpush(key, "x"),
    "set": lambda client, key: client.sadd(key, "x"),
    "stream": lambda client, key: client.xadd(key, {"a": "x"}, id="1-1"),
}
TYPES = st.sampled_from(sorted(MAKE))


@given(st.lists(st.tuples(TYPES, st.none() | TYPES), min_size=1, max_size=6))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_of_a_wrong_type_go_and_no_others(
    call: Call, client: redis.Redis, keys: list[tuple[str, str | None]]
) -> None:
    client.flushdb()
    for at, (_, held) in enumerate(keys):
        if held is not None:
            MAKE[held](client, f"t:{at}")
    wrong = {
        f"t:{at}".encode() for at, (wanted, held) in enumerate(keys) if held not in (None, wanted)
    }
    before = snapshot(client)
    code = call("drop_mistyped", [f"t:{at}" for at in range(len(keys))], *(one for one, _ in keys))
    assert code is (Code.OK if wrong else Code.DUP)
    after = {key: value for key, value in before.items() if key not in wrong}
    assert snapshot(client) == after
