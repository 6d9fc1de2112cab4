"""The broker's server by made-up facts, and as real ones give them."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from flowspec.doctor.broker import BrokerFacts, check, gather
from flowspec.doctor.finding import Severity
from flowspec.errors import BrokerUnreachable
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker, find_server
from tests.doctor.brokers import GOOD, changed, troubles
from tests.waiting import until


def test_a_good_broker_needs_nothing() -> None:
    assert troubles(check, GOOD) == []


@pytest.mark.parametrize(
    ("changes", "level", "found", "remedy"),
    [
        ({"mode": "sentinel"}, Severity.ERROR, "a sentinel", "the server that it watches"),
        ({"mode": "cluster", "nodes": 3}, Severity.ERROR, "cluster mode", "cluster-enabled no"),
        ({"mode": "cluster", "nodes": 0}, Severity.ERROR, "cluster mode", "cluster-enabled no"),
        ({"mode": "cluster", "nodes": 1}, Severity.NOTE, "only node", "add no other node"),
        ({"info": {"role": "slave"}}, Severity.ERROR, "refuses writes", "its primary"),
        (
            {"kind": "Redis", "version": (5, 0, 7)},
            Severity.ERROR,
            "Redis 5.0.7 is too old; FlowSpec needs 6.2",
            "flowspec[broker]",
        ),
        (
            {"kind": "Redis", "version": (7, 0, 15)},
            Severity.NOTE,
            "CVE-2025-49844",
            "update it",
        ),
        ({"pings": (0.004,) * 100}, Severity.NOTE, "4.00 ms in the median", "by cable"),
        ({"pings": (0.05,) * 3}, Severity.WARNING, "most of a token's time", "by cable"),
        ({"clock_ahead": -7.0}, Severity.WARNING, "7.0 s behind", "set-ntp"),
        ({"clock_ahead": 7.0}, Severity.WARNING, "7.0 s ahead of", "set-ntp"),
        (
            {"refused": ("EVALSHA on k", "INFO")},
            Severity.ERROR,
            "may not run EVALSHA on k, INFO",
            "ACL SETUSER",
        ),
    ],
)
def test_each_trouble_has_its_remedy(
    changes: dict[str, Any], level: Severity, found: str, remedy: str
) -> None:
    (trouble,) = troubles(check, changed(**changes))
    assert trouble.level is level
    assert found in trouble.found
    assert remedy in trouble.remedy


@pytest.mark.parametrize(
    ("kind", "version", "fixed"),
    [
        ("Redis", (6, 2, 19), False),
        ("Redis", (6, 2, 20), True),
        ("Redis", (7, 4, 6), True),
        ("Redis", (8, 1, 0), False),
        ("Redis", (8, 4, 0), True),
        ("Valkey", (8, 0, 5), False),
        ("Valkey", (8, 1, 4), True),
        ("Valkey", (9, 0, 0), True),
    ],
)
def test_versions_with_the_fix(kind: str, version: tuple[int, ...], fixed: bool) -> None:
    assert (troubles(check, changed(kind=kind, version=version)) == []) is fixed


def test_one_slow_ping_of_a_hundred_is_shown() -> None:
    shown = [finding.found for finding in check(changed(pings=(0.0001,) * 97 + (0.009,) * 3))]
    assert any("0.10 ms in the median, 9.00 ms in the 99th percentile" in line for line in shown)


def test_a_private_brokers_clock_is_this_machines() -> None:
    assert troubles(check, changed(private=True, clock_ahead=9.0)) == []


def test_a_real_broker(server: PrivateBroker, client: redis.Redis) -> None:
    facts = gather(server.url)
    assert facts.kind in ("Redis", "Valkey")
    assert facts.version >= (6, 2)
    assert len(facts.pings) == 100
    assert abs(facts.clock_ahead) < 1
    assert (facts.local, facts.encrypted, facts.password) == (True, False, True)
    assert facts.refused == ()
    assert facts.number("maxmemory") == 4 << 30
    assert facts.config is not None
    assert facts.config["timeout"] == "0"
    assert troubles(check, facts) == []
    secret = str(client.config_get("requirepass")["requirepass"])
    assert secret not in repr(facts)
    assert client.dbsize() == 0, "asking leaves nothing behind"


def test_a_wrong_password_is_told_and_not_shown(server: PrivateBroker) -> None:
    wrong = server.url.replace("unix://:", "unix://:not-")
    with pytest.raises(BrokerUnreachable, match="refused the password") as raised:
        gather(wrong)
    assert "not-" not in str(raised.value)


def test_a_restricted_user(server: PrivateBroker, client: redis.Redis) -> None:
    client.execute_command(  # type: ignore[no-untyped-call]
        "ACL", "SETUSER", "limited", "on", ">word", "~flowspec:*", "+@all", "-config", "-acl"
    )
    try:
        path = server.url.rpartition("@")[2]
        facts = gather(f"unix://limited:word@{path}")
        assert facts.refused == ()
        assert facts.config is None
        assert facts.number("maxmemory") == 4 << 30, "INFO says it too"
    finally:
        client.acl_deluser("limited")


@pytest.mark.parametrize(
    ("rules", "restricted"),
    [
        ("off resetpass", False),
        ("-debug -flushall", False),
        ("-xadd", True),
        ("-pexpireat", True),
        ("resetkeys", True),
        ("off -@write", True),
    ],
)
def test_what_the_default_user_may_run(rules: str, restricted: bool) -> None:
    """Whether somebody may log in as it is another thing."""
    with PrivateBroker() as broker:
        client = connect(broker.url)
        try:
            assert not gather(broker.url).default_restricted
            client.execute_command(  # type: ignore[no-untyped-call]
                "ACL", "SETUSER", "admin", "on", ">word", "~*", "&*", "+@all"
            )
            client.execute_command("ACL", "SETUSER", "default", *rules.split())  # type: ignore[no-untyped-call]
            path = broker.url.rpartition("@")[2]
            assert gather(f"unix://admin:word@{path}").default_restricted is restricted
        finally:
            client.close()


def test_a_real_cluster_of_one_node(tmp_path: Path) -> None:
    with socket.socket() as own, socket.socket() as bus:
        for found in (own, bus):
            found.bind(("127.0.0.1", 0))
        port, bus_port = (str(found.getsockname()[1]) for found in (own, bus))

    def asked() -> BrokerFacts | None:
        try:
            return gather(f"redis://127.0.0.1:{port}")
        except BrokerUnreachable:
            return None

    words = ("--port", port, "--cluster-port", bus_port, "--save", "", "--dir", str(tmp_path))
    with subprocess.Popen(
        [str(find_server()), *words, "--bind", "127.0.0.1", "--cluster-enabled", "yes"],
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            facts = until(asked)
        finally:
            server.kill()
    assert (facts.mode, facts.nodes) == ("cluster", 1)
