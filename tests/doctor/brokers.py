"""Made-up facts of a broker that needs nothing, and findings on changed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flowspec.doctor.broker import BrokerFacts
from flowspec.doctor.finding import Finding, Severity

GOOD = BrokerFacts(
    kind="Valkey",
    version=(9, 1, 2),
    mode="standalone",
    pings=(0.0002,) * 100,
    clock_ahead=0.001,
    refused=(),
    info={
        "role": "master",
        "maxmemory": 4 << 30,
        "used_memory": 1 << 20,
        "maxmemory_policy": "noeviction",
        "aof_enabled": 1,
        "aof_last_write_status": "ok",
        "rdb_last_bgsave_status": "ok",
        "maxclients": 10_000,
        "connected_clients": 5,
    },
    config={
        "appendfsync": "everysec",
        "save": "",
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "timeout": "0",
        "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 1 1 60",
    },
)


def changed(**changes: Any) -> BrokerFacts:
    """GOOD with other fields; ``info`` and ``config`` add to what is there."""
    for name in ("info", "config"):
        if changes.get(name) is not None:
            changes[name] = {**getattr(GOOD, name), **changes[name]}
    return replace(GOOD, **changes)


def troubles(
    check: Callable[[BrokerFacts], Iterator[Finding]], facts: BrokerFacts
) -> list[Finding]:
    """Findings that are not OK."""
    return [finding for finding in check(facts) if finding.level is not Severity.OK]
