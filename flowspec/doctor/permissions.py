"""Which commands a server lets this user run: asked without running any.

The commands are queued in a transaction, where the server checks each against the user's
permissions, and the transaction is then discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from flowspec.transport.connections.answers import is_refused_for_now
from flowspec.transport.connections.redis_client import Command, pack
from flowspec.transport.wire.keys import JOBS, Keys

_KEY = f"{Keys().tag}:doctor"
_SHA = "0" * 40
#: Every command of workers, clients and scripts, on a key like those that FlowSpec uses.
COMMANDS = (
    ("PING",),
    ("TIME",),
    ("INFO", "server"),
    ("SCRIPT", "LOAD", "return 1"),
    ("EVALSHA", _SHA, "1", _KEY),
    ("XADD", JOBS, "*", "field", "value"),
    ("XGROUP", "CREATE", JOBS, "group", "0", "MKSTREAM"),
    ("XREADGROUP", "GROUP", "group", "name", "STREAMS", JOBS, ">"),
    ("XACK", JOBS, "group", "0-1"),
    ("XDEL", JOBS, "0-1"),
    ("XRANGE", JOBS, "-", "+"),
    ("XINFO", "STREAM", JOBS),
    ("XLEN", JOBS),
    ("TYPE", JOBS),
    ("DEL", JOBS),
    ("XADD", _KEY, "*", "field", "value"),
    ("XREAD", "STREAMS", _KEY, "0"),
    ("XRANGE", _KEY, "-", "+"),
    ("XINFO", "STREAM", _KEY),
    ("XLEN", _KEY),
    ("XTRIM", _KEY, "MINID", "0"),
    ("GET", _KEY),
    ("MGET", _KEY),
    ("SET", _KEY, "value"),
    ("DEL", _KEY),
    ("EXISTS", _KEY),
    ("PEXPIRE", _KEY, "1"),
    ("HGET", _KEY, "field"),
    ("HGETALL", _KEY),
    ("HMGET", _KEY, "field"),
    ("HSET", _KEY, "field", "value"),
    ("HSETNX", _KEY, "field", "value"),
    ("HDEL", _KEY, "field"),
    ("HEXISTS", _KEY, "field"),
    ("HINCRBY", _KEY, "field", "1"),
    ("LLEN", _KEY),
    ("LPOS", _KEY, "value"),
    ("LPUSH", _KEY, "value"),
    ("LRANGE", _KEY, "0", "-1"),
    ("LREM", _KEY, "1", "value"),
    ("RPUSH", _KEY, "value"),
    ("SADD", _KEY, "member"),
    ("SCARD", _KEY),
    ("SISMEMBER", _KEY, "member"),
    ("SMEMBERS", _KEY),
    ("SREM", _KEY, "member"),
    ("TYPE", _KEY),
    ("ZADD", _KEY, "1", "member"),
    ("ZRANGEBYSCORE", _KEY, "-inf", "1"),
    ("ZREM", _KEY, "member"),
    ("ZREMRANGEBYSCORE", _KEY, "-inf", "1"),
)

#: What a server writes into its log in the place of PEXPIRE and XREADGROUP.
_IN_LOGS = (("PEXPIREAT", _KEY, "1"), ("XCLAIM", JOBS, "group", "name", "0", "0-1"))


def refused(client: redis.Redis) -> tuple[str, ...]:
    """The commands that the server at ``client`` refuses, each as ``NAME on KEY``.

    RedisError if it takes no transaction for now.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        # Alone, since the others would be run without it.
        (error,) = _errors(connection, [("MULTI",)])
        if error is not None and is_refused_for_now(error):
            raise error
        if error is not None:
            return ("MULTI",)
        errors = _errors(connection, [*COMMANDS, ("DISCARD",)])
    finally:
        connection.disconnect()
        pool.release(connection)
    # A full broker's answer is nothing about this user.
    return tuple(
        _shown(command)
        for command, error in zip(COMMANDS, errors, strict=False)
        if error is not None and not is_refused_for_now(error)
    )


def restricts(client: redis.Redis, user: str) -> bool:
    """Whether the server refuses ``user`` what its log of writes holds, logged in or not.

    False if it does not say: this user may not ask, or the server is older than Redis 7.0.
    """
    pipe = client.pipeline(transaction=False)
    for command in (*COMMANDS, *_IN_LOGS):
        pipe.execute_command("ACL", "DRYRUN", user, *command)  # type: ignore[no-untyped-call]
    answers = pipe.execute(raise_on_error=False)
    return any(isinstance(answer, bytes) and answer != b"OK" for answer in answers)


def _errors(connection: Any, commands: Sequence[Command]) -> list[redis.ResponseError | None]:
    """The errors by which ``commands``, sent in one round trip, are answered; None: by none."""
    connection.send_packed_command([pack(commands)])
    return [_error(connection) for _ in commands]


def _error(connection: Any) -> redis.ResponseError | None:
    try:
        connection.read_response()
    except redis.ResponseError as error:
        return error
    return None


def _shown(command: tuple[str, ...]) -> str:
    keys = [word for word in command if word in (JOBS, _KEY)]
    return f"{command[0]} on {keys[0]}" if keys else command[0]
