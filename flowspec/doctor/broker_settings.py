"""The broker's settings: memory and eviction, persistence, who may connect, connections' limits."""

from __future__ import annotations

from collections.abc import Iterator

from flowspec.doctor.broker import SUBJECT, BrokerFacts
from flowspec.doctor.finding import Finding, error, note, ok, size, warning

_MIB = 1 << 20
#: Below this the rows of one long prompt may fill the server, bytes.
_LITTLE_MEMORY = 64 * _MIB
#: A reader that lags by a few passes has this much of rows waiting, bytes.
_LITTLE_BUFFER = 64 * _MIB
#: Workers write at least this often while a job runs, seconds; between jobs they may be silent.
_SHORT_TIMEOUT = 300
_NEARLY_FULL = 0.8
_KEEP = "set `maxmemory-policy noeviction` in its configuration"
_SAVE = "set `appendonly yes` in its configuration"


def check(facts: BrokerFacts) -> Iterator[Finding]:
    yield from _eviction(facts)
    yield from _memory(facts)
    yield from _writes(facts)
    if facts.config is None:
        yield note(
            SUBJECT,
            "its settings may not be read (CONFIG is forbidden, as on managed servers): "
            "persistence and limits are unknown",
            "look at them where the server is managed; eviction must be off, AOF should be on",
        )
    if not facts.private:
        yield from _persistence(facts)
        yield from _access(facts)
    yield from _connections(facts)


def _eviction(facts: BrokerFacts) -> Iterator[Finding]:
    policy = facts.text("maxmemory_policy") or (facts.config or {}).get("maxmemory-policy", "")
    if policy == "noeviction":
        yield ok(SUBJECT, "maxmemory-policy is noeviction")
    elif policy and facts.number("maxmemory"):
        yield error(
            SUBJECT,
            f"maxmemory-policy is {policy}: a server that is full deletes jobs and leases",
            _KEEP,
        )
    elif policy:
        yield warning(
            SUBJECT,
            f"maxmemory-policy is {policy}: once maxmemory is set, a server that is full deletes "
            "jobs and leases",
            _KEEP,
        )
    if facts.number("evicted_keys"):
        yield warning(
            SUBJECT,
            f"it has deleted {facts.number('evicted_keys')} keys for want of memory",
            f"{_KEEP}, and use a server that nothing else fills",
        )


def _memory(facts: BrokerFacts) -> Iterator[Finding]:
    most, used = facts.number("maxmemory"), facts.number("used_memory")
    if not most:
        yield warning(
            SUBJECT,
            "maxmemory is not set: a full server is killed by the system instead of refusing jobs",
            "set maxmemory, to 4gb for example",
        )
    elif most < _LITTLE_MEMORY:
        yield warning(
            SUBJECT,
            f"maxmemory is {size(most)}: the rows of one long prompt may fill it",
            "raise maxmemory to 1gb or more",
        )
    elif used > _NEARLY_FULL * most:
        yield warning(
            SUBJECT,
            f"{size(used)} of {size(most)} are used; a full server refuses jobs",
            "raise maxmemory, or move other programs' data to another server",
        )
    else:
        yield ok(SUBJECT, f"{size(used)} of {size(most)} memory used")


def _writes(facts: BrokerFacts) -> Iterator[Finding]:
    """A server that failed to save refuses writes."""
    if facts.number("aof_enabled") and facts.text("aof_last_write_status") not in ("", "ok"):
        yield error(
            SUBJECT,
            "its last write to the append-only file failed, and it refuses writes until one works",
            "free space on its disk, and look into its log",
        )
    stops = (facts.config or {}).get("stop-writes-on-bgsave-error", "yes") == "yes"
    saves = facts.config is None or bool(facts.config.get("save"))
    if stops and saves and facts.text("rdb_last_bgsave_status") not in ("", "ok"):
        yield error(
            SUBJECT,
            "its last snapshot failed, and it refuses writes until one works",
            "free space on its disk, and look into its log",
        )


def _persistence(facts: BrokerFacts) -> Iterator[Finding]:
    if facts.number("aof_enabled"):
        yield from _append_only(facts)
    elif facts.config is not None and facts.config.get("save"):
        yield warning(
            SUBJECT,
            "it saves snapshots only: a crash loses jobs and output since the last one",
            _SAVE,
        )
    elif facts.config is not None:
        yield warning(
            SUBJECT,
            "it saves nothing: a restart loses waiting jobs and all output",
            f"{_SAVE} unless that is meant",
        )


def _append_only(facts: BrokerFacts) -> Iterator[Finding]:
    if facts.default_restricted and facts.kind == "Redis" and facts.version[:2] == (7, 0):
        yield error(
            SUBJECT,
            "Redis 7.0 replays scripts and transactions as the default user, which is restricted "
            "here: a restart loses them without a word",
            "set `user default off resetpass ~* &* +@all` (nobody can log in as a user that is "
            "off), or use Redis 7.2 or Valkey 9",
        )
    match (facts.config or {}).get("appendfsync", ""):
        case "always":
            yield note(
                SUBJECT,
                "it syncs its append-only file at every write, which costs milliseconds a hop",
                "set `appendfsync everysec` if a second of output may be lost when power fails",
            )
        case "no":
            yield note(
                SUBJECT,
                "the system decides when the append-only file is synced: a power failure may lose "
                "half a minute",
                "set `appendfsync everysec`",
            )
        case _:
            yield ok(
                SUBJECT,
                "append-only file: a crash loses nothing, a power failure about one second",
            )


def _access(facts: BrokerFacts) -> Iterator[Finding]:
    config = facts.config or {}
    bound = config.get("bind", "127.0.0.1")
    everywhere = not bound or any(name in bound.split() for name in ("*", "-::*", "0.0.0.0", "::"))
    if not facts.password and facts.local:
        exposed = everywhere and config.get("protected-mode") == "no"
        reach = "everyone who reaches its port" if exposed else "every user of its machine"
        give = warning if exposed else note
        yield give(
            SUBJECT,
            f"it asks for no password: {reach} reads all prompts and can take it over",
            "set `requirepass`, and put the password into the URL",
        )
    elif not facts.password:
        yield warning(
            SUBJECT,
            "it asks for no password: everyone who reaches its port reads all prompts and can take "
            "it over",
            "set `requirepass`, put the password into the URL, and `bind` it to the workers' "
            "network",
        )
    elif not facts.local and not facts.encrypted:
        yield note(
            SUBJECT,
            "password and prompts cross the network unencrypted",
            "keep it in a network of your own, or use TLS (rediss://)",
        )
    else:
        yield ok(SUBJECT, "it asks for a password")


def _connections(facts: BrokerFacts) -> Iterator[Finding]:
    config = facts.config or {}
    timeout = config.get("timeout", "0")
    if timeout.isdigit() and 0 < int(timeout) < _SHORT_TIMEOUT:
        yield warning(
            SUBJECT,
            f"it closes connections that are silent for {timeout} s, as workers' are between jobs",
            "set `timeout 0`",
        )
    least = _output_limit(config.get("client-output-buffer-limit", ""))
    if 0 < least < _LITTLE_BUFFER:
        yield warning(
            SUBJECT,
            f"it cuts off a reader with {size(least)} of answers waiting, as a slow stage may have",
            "set `client-output-buffer-limit normal 0 0 0`",
        )
    most, now = facts.number("maxclients"), facts.number("connected_clients")
    if most and now > _NEARLY_FULL * most:
        yield warning(
            SUBJECT,
            f"{now} of {most} possible connections are taken; workers take three each",
            "raise `maxclients`, or end other programs",
        )


def _output_limit(setting: str) -> int:
    """The least hard or soft limit of normal clients, bytes; 0 for none.

    The setting is a list of ``class hard soft seconds``.
    """
    words = setting.split()
    for name, hard, soft in zip(words[::4], words[1::4], words[2::4], strict=False):
        if name == "normal":
            return min((int(limit) for limit in (hard, soft) if int(limit)), default=0)
    return 0
