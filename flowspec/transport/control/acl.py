"""Users of a broker, one for each role of a pipeline, each with the keys and commands it needs.

A script is no gate: the server checks its commands and keys against its caller's permissions. So a
role may run the commands of the scripts that it calls, which are read from their texts, and only
the scheduler loads scripts. A server checks each key of a script for reading and writing, so a
stage may read what it may write: records of jobs, logs and recordings. What a job asks, its prompt
too, is in keys that of the workers only the draft worker reads.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowspec.core.protocol.addresses import DRAFT, SCHEDULER, Address, worker_addresses
from flowspec.transport.base import role_of
from flowspec.transport.connections.scripts import load
from flowspec.transport.wire.keys import JOBS, Keys

#: What every connection does: it makes itself known, looks at the server, and begins transactions.
_ALWAYS = ("ping", "info", "hello", "multi", "exec", "discard")
#: What all workers run beside scripts: they read their streams, write rows and renew leases.
_WORKER = (
    *("evalsha", "script|exists", "time", "xread", "xadd", "xlen", "xtrim", "xinfo|stream"),
    *("hgetall", "hmget", "mget", "get", "del", "zadd", "zremrangebyscore"),
)
_STAGE_SCRIPTS = ("publish", "publish_together", "record", "trim", "claim", "release")
_DRAFT_SCRIPTS = (*_STAGE_SCRIPTS, "open_job", "commit_verdict", "finish")
_SCHEDULER = (
    *("script|load", "xgroup|create", "xreadgroup", "xack", "xdel", "xrange", "type"),
    *("hget", "hset", "lrange", "smembers"),
    *("zrangebyscore", "zrem", "zremrangebyscore"),
)
_CLIENT = (
    *("xadd", "xrange", "xread", "xlen", "hget", "hgetall", "hmget", "mget", "get"),
    *("scard", "llen", "lrange", "smembers", "pexpire", "del", "time", "zadd"),
    "zrangebyscore",
)
_CALL = re.compile(r"redis\.call\('(\w+)'")
#: Users who are no workers: programs that submit jobs, the gateway among them, and whoever looks
#: after the broker.
CLIENT = "client"
ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class User:
    """A user of the broker. ``rules``: keys and commands, as ``ACL SETUSER`` takes them."""

    name: str
    rules: tuple[str, ...]

    def line(self, password: str) -> str:
        """The user in an ACL file, which holds no more of ``password`` than its hash."""
        digest = hashlib.sha256(password.encode()).hexdigest()
        return f"user {self.name} on #{digest} {' '.join(self.rules)}"


def users(keys: Keys, stages: int, middles: int = 0) -> list[User]:
    """The users of the pipeline ``keys``: its workers, the scheduler, clients, and an admin."""
    workers = [_worker(keys, worker) for worker in worker_addresses(stages, middles)]
    everywhere = (f"~{keys.tag}:*", f"~{JOBS}")
    scheduler = User(
        _name(keys, role_of(SCHEDULER)),
        (*everywhere, *_may((*_ALWAYS, *_WORKER, *_SCHEDULER, *_commands(load())))),
    )
    return [scheduler, *workers, _client(keys), User(_name(keys, ADMIN), ("~*", "&*", "+@all"))]


def acl_file(found: Sequence[User], passwords: Sequence[str]) -> str:
    """The ACL file with ``found``.

    Nobody can log in as ``default``, which has all permissions: when a server of Redis 7.0 replays
    its log of writes it runs the transactions as this user, and loses those that it may not do.
    It has no password, and ``nopass`` would be another thing: a server whose ``default`` needs none
    is in protected mode and serves its own machine alone.
    """
    lines = ["user default off resetpass ~* &* +@all"]
    lines += [user.line(password) for user, password in zip(found, passwords, strict=True)]
    return "\n".join(lines) + "\n"


def new_password() -> str:
    """A password that nobody guesses, without characters that a URL would have to escape."""
    return secrets.token_hex(24)


def _worker(keys: Keys, worker: Address) -> User:
    role = role_of(worker)
    tag = keys.tag
    # Each worker's publish names the logs of all, since it may complete a task of any.
    own = [f"{tag}:{kind}:*" for kind in ("job", "run", "recording", "log", f"inbox:{worker}")]
    own += [keys.rows(worker), keys.claim(role), keys.generations, keys.spares]
    scripts: Sequence[str] = _STAGE_SCRIPTS
    if worker == DRAFT:
        own += [f"{tag}:out:*", f"{tag}:request:*", keys.running, keys.submissions]
        scripts = _DRAFT_SCRIPTS
    read = [keys.record, f"{tag}:claim:*"]
    write = [f"{tag}:rows:*", f"{tag}:inbox:*"]
    patterns = (
        *(f"~{key}" for key in own),
        *(f"%R~{key}" for key in read),
        *(f"%W~{key}" for key in write),
    )
    return User(_name(keys, role), (*patterns, *_may((*_ALWAYS, *_WORKER, *_commands(scripts)))))


def _client(keys: Keys) -> User:
    tag = keys.tag
    kinds = ("job:*", "request:*", "out:*", "wake:*", "followed")
    both = (f"~{JOBS}", *(f"~{tag}:{kind}" for kind in kinds))
    looked_at = ("recording:*", "claim:*", "pipeline", "generations", "queue", "running", "spares")
    read = tuple(f"%R~{tag}:{kind}" for kind in looked_at)
    return User(_name(keys, CLIENT), (*both, *read, *_may((*_ALWAYS, *_CLIENT))))


def _name(keys: Keys, role: str) -> str:
    return f"{keys.pipeline}-{role}"


def _commands(names: Iterable[str]) -> set[str]:
    """The commands that the scripts ``names`` call."""
    scripts = load()
    return {found.lower() for name in names for found in _CALL.findall(scripts[name].text)}


def _may(commands: Iterable[str]) -> tuple[str, ...]:
    """Rules that allow ``commands`` and nothing else."""
    return ("-@all", *(f"+{command}" for command in sorted(set(commands))))
