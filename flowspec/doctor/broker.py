"""The broker's server: its version, its role, its answers' latency, its clock, its permissions."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis

from flowspec.doctor import permissions
from flowspec.doctor.finding import Finding, error, note, ok, warning
from flowspec.errors import installs
from flowspec.transport.connections.connection import connect, translate
from flowspec.transport.connections.server import OLDEST

SUBJECT = "broker"
_PINGS = 100
#: Longest time spent on pings, seconds.
PING_SECONDS = 5.0
#: A median above these makes hops a part of every token's time, or most of it, seconds.
_NOTED_LATENCY, _HIGH_LATENCY = 0.002, 0.020
#: A difference of clocks that distorts queueing times, seconds.
_CLOCK_DIFFERENCE = 1.0
#: First versions, by kind and minor version, in which a script cannot break out of the Lua
#: interpreter (CVE-2025-49844); minor versions that are not named never had a fix, or come later.
_FIXED = {
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SECRET = re.compile("pass|auth")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """What a server says of itself; nothing here is secret.

    ``pings``: round trips, seconds. ``clock_ahead``: its clock's lead over this machine's, seconds.
    ``refused``: commands that it does not let this user run. ``info``: fields of INFO. ``config``:
    its settings, None if they may not be read. ``default_restricted``: its default user may not
    run all that FlowSpec does. ``local``: on this machine. ``encrypted``: over TLS. ``password``:
    the URL holds one. ``private``: started for this check. ``nodes``: of its cluster; 0: it does
    not say.
    """

    kind: str
    version: Version
    mode: str
    pings: tuple[float, ...]
    clock_ahead: float
    refused: tuple[str, ...]
    info: Mapping[str, object]
    config: Mapping[str, str] | None
    default_restricted: bool = False
    local: bool = True
    encrypted: bool = False
    password: bool = True
    private: bool = False
    nodes: int = 1

    def number(self, name: str) -> int:
        """A field of INFO; 0 if the server does not give it."""
        value = self.info.get(name)
        return int(value) if isinstance(value, int | float | str) and str(value).isdigit() else 0

    def text(self, name: str) -> str:
        """A field of INFO; empty if the server does not give it."""
        return str(self.info.get(name, ""))

    @property
    def shown(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"


def gather(url: str, *, private: bool = False) -> BrokerFacts:
    """Ask the server at ``url``; BrokerError if it cannot be reached or refuses the password."""
    client = connect(url)
    try:
        return _ask(client, url, private)
    except redis.RedisError as failed:
        raise translate(failed, url) from None
    finally:
        client.close()


def _ask(client: redis.Redis, url: str, private: bool) -> BrokerFacts:
    client.ping()
    info: Any = client.info("everything")
    kind, version = ("Valkey" if "valkey_version" in info else "Redis"), _version(info)
    parts = urlsplit(url)
    return BrokerFacts(
        kind=kind,
        version=version,
        mode=str(info.get("redis_mode", info.get("server_mode", "standalone"))),
        pings=_pings(client),
        clock_ahead=_clock_ahead(client),
        refused=permissions.refused(client),
        info=info,
        config=_config(client),
        default_restricted=permissions.restricts(client, "default"),
        local=parts.scheme == "unix" or (parts.hostname or "localhost") in _LOOPBACK,
        encrypted=parts.scheme in ("rediss", "valkeys"),
        password=bool(parts.password or parse_qs(parts.query).get("password")),
        private=private,
        nodes=_nodes(client) if info.get("redis_mode") == "cluster" else 1,
    )


def _nodes(client: redis.Redis) -> int:
    try:
        answer: Any = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        return 0
    return int(answer["cluster_known_nodes"])


def _version(info: Mapping[str, object]) -> Version:
    text = str(info.get("valkey_version", info.get("redis_version", "0")))
    numbers = [part for part in text.split(".") if part.isdigit()]
    return tuple(map(int, numbers))


def _pings(client: redis.Redis) -> tuple[float, ...]:
    taken: list[float] = []
    end = time.monotonic() + PING_SECONDS
    while len(taken) < _PINGS and time.monotonic() < end:
        began = time.perf_counter()
        client.ping()
        taken.append(time.perf_counter() - began)
    return tuple(taken)


def _clock_ahead(client: redis.Redis) -> float:
    before = time.time()
    answer: Any = client.time()
    after = time.time()
    return float(answer[0] + answer[1] / 1e6 - (before + after) / 2)


def _config(client: redis.Redis) -> Mapping[str, str] | None:
    try:
        found: Any = client.config_get("*")
    except redis.ResponseError:
        return None
    return {name: str(value) for name, value in found.items() if not _SECRET.search(name)}


def check(facts: BrokerFacts) -> Iterator[Finding]:
    if facts.mode == "sentinel":
        yield error(
            SUBJECT,
            "the URL is that of a sentinel, which holds no data",
            "give the URL of the server that it watches",
        )
        return
    yield from _version_of(facts)
    yield from _role(facts)
    yield from _latency(facts)
    if not facts.private:
        yield from _clock(facts)
    if facts.refused:
        yield error(
            SUBJECT,
            f"this user may not run {', '.join(facts.refused)}",
            "allow it: `ACL SETUSER NAME +@all ~flowspec:*`; on a managed server, choose a plan or "
            "user that may",
        )
    else:
        yield ok(SUBJECT, "every command and script that FlowSpec uses is allowed")


def _version_of(facts: BrokerFacts) -> Iterator[Finding]:
    if facts.version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield error(
            SUBJECT,
            f"{facts.shown} is too old; FlowSpec needs {oldest}",
            f"install a newer Redis or Valkey; `{installs('flowspec[broker]')}` brings one",
        )
        return
    yield ok(SUBJECT, facts.shown)
    fixed = _FIXED[facts.kind]
    minor = facts.version[:2]
    if minor < max(fixed) and minor not in fixed:
        old = True
    else:
        old = minor in fixed and facts.version[2:3] < (fixed[minor],)
    if old:
        yield note(
            SUBJECT,
            f"{facts.shown} by its number lacks the fix of CVE-2025-49844, by which a user who may "
            "send scripts can take over the server",
            "update it, unless its distribution has taken the fix into this version",
        )


def _role(facts: BrokerFacts) -> Iterator[Finding]:
    if facts.mode == "cluster" and facts.nodes == 1:
        yield note(
            SUBJECT,
            "the server is a cluster's only node, so it has all keys",
            "add no other node: workers do not follow redirections",
        )
    elif facts.mode == "cluster":
        yield error(
            SUBJECT,
            "the server is in cluster mode, and workers do not follow redirections",
            "use a server with `cluster-enabled no`",
        )
    if facts.text("role") in ("slave", "replica"):
        yield error(
            SUBJECT,
            "the server is a replica, which refuses writes",
            "give the URL of its primary",
        )


def _latency(facts: BrokerFacts) -> Iterator[Finding]:
    median = statistics.median(facts.pings)
    slowest = sorted(facts.pings)[max(0, math.ceil(len(facts.pings) * 0.99) - 1)]
    found = (
        f"round trip {median * 1000:.2f} ms in the median, {slowest * 1000:.2f} ms in the 99th "
        f"percentile of {len(facts.pings)}"
    )
    nearer = "run the broker in the workers' own network, by cable; `flowspec simulate` shows what"
    if median > _HIGH_LATENCY:
        yield warning(SUBJECT, f"{found}: most of a token's time", f"{nearer} it costs")
    elif median > _NOTED_LATENCY:
        yield note(SUBJECT, f"{found}: a part of every token's time", f"{nearer} it costs")
    else:
        yield ok(SUBJECT, found)


def _clock(facts: BrokerFacts) -> Iterator[Finding]:
    if abs(facts.clock_ahead) > _CLOCK_DIFFERENCE:
        way = "ahead of" if facts.clock_ahead > 0 else "behind"
        yield warning(
            SUBJECT,
            f"its clock is {abs(facts.clock_ahead):.1f} s {way} this machine's: "
            "times in logs and recordings of several machines do not match",
            "let a time server set both clocks (`timedatectl set-ntp true`)",
        )
    else:
        yield ok(SUBJECT, f"its clock is within {abs(facts.clock_ahead) * 1000:.0f} ms")
