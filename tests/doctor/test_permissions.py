"""Permissions are those of every command that the package sends, and asking changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import redis

from flowspec.doctor.permissions import COMMANDS, refused
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker

ROOT = Path(__file__).parent.parent.parent
#: Words in the broker's sources that are parts of commands, or of answers.
PARTS = {
    *("BLOCK", "BUSYGROUP", "COUNT", "GROUP", "MINID", "NOAUTH", "NOGROUP", "STREAMS", "WRONGPASS"),
    *("UNBLOCKED", "WRONGTYPE", "MAXLEN", "NOMKSTREAM"),
}
#: Answers of servers; what only a server's owner does; rules of users.
NO_COMMANDS = {"answers.py", "server.py", "acl.py"}
#: Commands of transactions; whoever may not begin one is refused as a whole.
AROUND = {"MULTI", "EXEC", "DISCARD"}


def test_every_command_is_asked_for() -> None:
    asked = {command[0] for command in COMMANDS}
    scripts = "\n".join(file.read_text() for file in (ROOT / "lua").rglob("*.lua"))
    called = set(re.findall(r"redis\.call\(['\"](\w+)['\"]", scripts))
    assert called
    assert called <= asked
    files = (ROOT / "flowspec/transport").rglob("*.py")
    source = "\n".join(file.read_text() for file in files if file.name not in NO_COMMANDS)
    named = set(re.findall(r'"([A-Z]{3,})"', source)) - PARTS - AROUND
    assert {"XADD", "EVALSHA"} <= named
    assert named <= asked
    methods = set(re.findall(r"(?:client|connection)\.((?:x|h|l|s|m)\w+)\(", source))
    assert {method.upper().partition("_")[0] for method in methods} - {"SEND", "LOAD"} <= asked


def test_asking_leaves_nothing(client: redis.Redis) -> None:
    assert refused(client) == ()
    assert client.dbsize() == 0


def test_a_full_broker_is_no_lack_of_permissions(client: redis.Redis) -> None:
    before = str(client.config_get("maxmemory")["maxmemory"])
    client.config_set("maxmemory", 1)
    try:
        assert refused(client) == ()
    finally:
        client.config_set("maxmemory", before)


def test_what_a_user_may_not_run_is_named() -> None:
    with PrivateBroker() as broker:
        admin = connect(broker.url)
        rules = ("on", ">word", "~flowspec:{p0}:*", "+@all", "-evalsha", "-xadd")
        admin.execute_command("ACL", "SETUSER", "limited", *rules)  # type: ignore[no-untyped-call]
        client = connect(f"unix://limited:word@{broker.url.rpartition('@')[2]}")
        try:
            found = refused(client)
            assert "EVALSHA on flowspec:{p0}:doctor" in found
            assert "XADD on flowspec:{p0}:doctor" in found
            assert "XGROUP on flowspec:jobs" in found, "the key is not this user's"
            assert "HSET on flowspec:{p0}:doctor" not in found
            admin.execute_command("ACL", "SETUSER", "limited", "-multi")  # type: ignore[no-untyped-call]
            assert refused(client) == ("MULTI",)
            assert admin.dbsize() == 0, "without a transaction nothing is sent"
        finally:
            client.close()
            admin.close()
