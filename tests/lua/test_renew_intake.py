"""renew_intake: whatever was put into the intake, jobs can be submitted afterwards."""

from __future__ import annotations

import pytest
import redis

from flowspec.core.protocol.codes import Code
from tests.lua.conftest import Call, snapshot

INTAKE = "t:jobs"
LAST = "18446744073709551615-18446744073709551615"
DAY_MS = 86_400_000


def renew(call: Call, most: int = 100) -> Code:
    return call("renew_intake", [INTAKE], most, "flowspec", DAY_MS)


def test_an_intake_with_good_ids_is_left_alone(call: Call, client: redis.Redis) -> None:
    assert renew(call) is Code.DUP
    client.xadd(INTAKE, {"prompt": "a"})
    before = snapshot(client)
    assert renew(call) is Code.DUP
    assert snapshot(client) == before


@pytest.mark.parametrize("last", [LAST, f"{1 << 60}-3"])
@pytest.mark.parametrize("is_there", [False, True])
def test_what_waits_is_read_again_and_jobs_can_be_submitted(
    call: Call, client: redis.Redis, last: str, is_there: bool
) -> None:
    client.xgroup_create(INTAKE, "flowspec", id="0", mkstream=True)
    first, second = (client.xadd(INTAKE, {"prompt": text}) for text in "ab")
    client.xreadgroup("flowspec", "p0", {INTAKE: ">"}, count=1)
    client.xadd(INTAKE, {"prompt": "c"}, id=last)
    if not is_there:
        client.xdel(INTAKE, last)
    before = snapshot(client)
    assert renew(call, most=1) is Code.FULL
    assert snapshot(client) == before
    assert renew(call) is Code.OK
    third = client.xadd(INTAKE, {"prompt": "d"})
    ((_, found),) = client.xreadgroup("flowspec", "p0", {INTAKE: ">"})  # type: ignore[misc,str-unpack]
    known = {entry: fields[b"prompt"] for entry, fields in found}
    assert (known.pop(first), known.pop(second), known.pop(third)) == (b"a", b"b", b"d")
    assert list(known.values()) == ([b"c"] if is_there else [])


def test_a_key_of_another_type_gives_way(call: Call, client: redis.Redis) -> None:
    client.set(INTAKE, "text")
    assert renew(call) is Code.OK
    assert client.xinfo_groups(INTAKE)[0]["name"] == b"flowspec"
