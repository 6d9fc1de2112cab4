"""The broker's settings by made-up facts, and as a real one gives them."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.doctor.broker import gather
from flowspec.doctor.broker_settings import check
from flowspec.doctor.finding import Severity
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker
from tests.doctor.brokers import GOOD, changed, troubles

NO_AOF = {"aof_enabled": 0}
OPEN = {"bind": "* -::*", "protected-mode": "no"}


def test_a_good_broker_needs_nothing() -> None:
    assert troubles(check, GOOD) == []


@pytest.mark.parametrize(
    ("changes", "level", "found", "remedy"),
    [
        (
            {"info": {"maxmemory_policy": "allkeys-lru"}},
            Severity.ERROR,
            "allkeys-lru: a server that is full deletes jobs",
            "noeviction",
        ),
        ({"info": {"evicted_keys": 3}}, Severity.WARNING, "deleted 3 keys", "noeviction"),
        ({"info": {"maxmemory": 0}}, Severity.WARNING, "maxmemory is not set", "4gb"),
        ({"info": {"maxmemory": 9 << 20}}, Severity.WARNING, "maxmemory is 9 MiB", "1gb"),
        (
            {"info": {"used_memory": 15 << 28}},
            Severity.WARNING,
            "3.8 GiB of 4.0 GiB are used",
            "raise maxmemory",
        ),
        (
            {"info": {"aof_last_write_status": "err"}},
            Severity.ERROR,
            "refuses writes",
            "free space",
        ),
        (
            {"info": {"rdb_last_bgsave_status": "err"}, "config": {"save": "60 1"}},
            Severity.ERROR,
            "last snapshot failed",
            "free space",
        ),
        ({"config": None}, Severity.NOTE, "CONFIG is forbidden", "where the server is managed"),
        (
            {"info": NO_AOF, "config": {"save": "3600 1"}},
            Severity.WARNING,
            "snapshots only",
            "appendonly yes",
        ),
        ({"info": NO_AOF}, Severity.WARNING, "saves nothing", "appendonly yes"),
        ({"config": {"appendfsync": "always"}}, Severity.NOTE, "milliseconds a hop", "everysec"),
        ({"config": {"appendfsync": "no"}}, Severity.NOTE, "half a minute", "everysec"),
        (
            {"kind": "Redis", "version": (7, 0, 15), "default_restricted": True},
            Severity.ERROR,
            "a restart loses them",
            "user default off resetpass",
        ),
        ({"password": False}, Severity.NOTE, "every user of its machine", "requirepass"),
        (
            {"password": False, "config": OPEN},
            Severity.WARNING,
            "everyone who reaches its port",
            "requirepass",
        ),
        ({"password": False, "local": False}, Severity.WARNING, "no password", "`bind`"),
        ({"local": False}, Severity.NOTE, "unencrypted", "rediss://"),
        ({"config": {"timeout": "60"}}, Severity.WARNING, "silent for 60 s", "timeout 0"),
        (
            {"config": {"client-output-buffer-limit": "normal 1048576 0 0 slave 0 0 0"}},
            Severity.WARNING,
            "1 MiB of answers",
            "normal 0 0 0",
        ),
        (
            {"config": {"client-output-buffer-limit": "slave 9 9 9 normal 0 2097152 5"}},
            Severity.WARNING,
            "2 MiB of answers",
            "normal 0 0 0",
        ),
        (
            {"info": {"maxclients": 100, "connected_clients": 95}},
            Severity.WARNING,
            "95 of 100",
            "maxclients",
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


def test_a_policy_without_a_limit_deletes_nothing_yet() -> None:
    found = troubles(check, changed(info={"maxmemory": 0, "maxmemory_policy": "volatile-lru"}))
    assert {finding.level for finding in found} == {Severity.WARNING}
    assert any("once maxmemory is set" in finding.found for finding in found)


def test_a_private_broker_may_forget() -> None:
    facts = changed(private=True, info=NO_AOF, password=False)
    assert troubles(check, facts) == []


def test_encrypted_connections_may_be_long() -> None:
    assert troubles(check, changed(local=False, encrypted=True)) == []


def test_a_failed_snapshot_that_stops_nothing() -> None:
    status = {"rdb_last_bgsave_status": "err"}
    assert troubles(check, changed(info=status)) == [], "it takes no snapshots"
    config = {"save": "60 1", "stop-writes-on-bgsave-error": "no"}
    assert troubles(check, changed(info=status, config=config)) == []


def test_real_settings_are_found() -> None:
    with PrivateBroker() as broker:
        client = connect(broker.url)
        try:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("timeout", 30)
            client.config_set("client-output-buffer-limit", "normal 1mb 0 0")
            found = troubles(check, gather(broker.url))
        finally:
            client.close()
    assert [finding.level for finding in found] == [
        Severity.ERROR,
        *[Severity.WARNING] * 3,
    ]
    policy, nothing_saved, timeout, buffer = [finding.found for finding in found]
    assert "allkeys-lru" in policy
    assert "saves nothing" in nothing_saved
    assert "30 s" in timeout
    assert "1 MiB" in buffer
