"""Connections of redis-py without its unsafe or slow defaults.

- No implicit retries: redis-py's default of ten would write an entry twice when a reply is lost.
  ``retrying`` is the only retry policy.
- The socket's timeout is longer than any blocking read; otherwise an idle stream would look like a
  dead server.
- Commands are packed in Python, because hiredis' packer slows down sharply above 128 KB. Replies
  are parsed by hiredis.
- RESP2 is set explicitly, so that replies keep one shape.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
import tenacity
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from flowspec.errors import BrokerError, ConfigError
from flowspec.transport.connections.answers import error_of, is_refused_for_now, passes

#: Longest blocking read, seconds.
MAX_BLOCK_SECONDS = 2.0
_SOCKET_TIMEOUT = MAX_BLOCK_SECONDS + 3.0
_CONNECT_TIMEOUT = 3.0
#: How long calls are retried while the broker is unreachable, seconds.
RETRY_SECONDS = 6.0
#: How long the first connection is tried: a wrong URL should not look like a slow broker.
FIRST_SECONDS = 2.0

#: Options of every connection.
OPTIONS: Mapping[str, Any] = {
    "protocol": 2,
    "socket_timeout": _SOCKET_TIMEOUT,
    "socket_connect_timeout": _CONNECT_TIMEOUT,
    "socket_read_size": 1 << 20,
    "driver_info": None,  # a server of Redis 7.0 does not know CLIENT SETINFO
}

#: Bounds of the waits between attempts, seconds.
_FIRST_WAIT = 0.05
_LAST_WAIT = 0.5

T = TypeVar("T")

DEFAULT_URL = "redis://localhost:6379/0"


_SCHEMES = ("redis", "valkey", "rediss", "valkeys", "unix")
#: Parts of a command that are longer are sent by themselves, not copied together, bytes.
_COPIED_BYTES = 6000


def connect(url: str) -> redis.Redis:
    """A new client for ``url``, not connected yet. ConfigError if it is not a broker URL."""
    with checked_url(url) as known:
        packer = PythonRespSerializer(_COPIED_BYTES, _encoded)
        pool = redis.ConnectionPool.from_url(
            known, retry=Retry(NoBackoff(), 0), command_packer=packer, **OPTIONS
        )
    return redis.Redis(connection_pool=pool)


def _encoded(part: object) -> bytes | memoryview:
    """``part`` of a command; DataError for what has no one form as text, as redis-py has it."""
    if isinstance(part, bytes | memoryview):
        return part
    if isinstance(part, str | int | float) and not isinstance(part, bool):
        return str(part).encode()
    raise redis.DataError(f"a command has a part of type {type(part).__name__}")


@contextmanager
def checked_url(url: str) -> Iterator[str]:
    """``url`` as redis-py knows it; ConfigError if it, or the body of the ``with``, refuses it."""
    if scheme_of(url) not in _SCHEMES:
        raise ConfigError(
            f"broker URL {redact(url)} is not understood; expected redis://, rediss:// or unix://"
        )
    database = url.partition("://")[2].rpartition("@")[2].partition("?")[0].partition("/")[2]
    if scheme_of(url) != "unix" and not re.fullmatch("[0-9]*", database):
        raise ConfigError(
            f"broker URL {redact(url)} ends with no number of a database; expected one like /0"
        )
    try:
        yield url.replace("valkey", "redis", 1) if scheme_of(url).startswith("valkey") else url
    except ValueError:  # the error's text may quote a part of the password
        raise ConfigError(
            f"broker URL {redact(url)} is not understood; expected "
            "scheme://user:password@host:port/0, "
            "with special characters in the password written as %XX"
        ) from None


def scheme_of(url: str) -> str:
    """The scheme of ``url``, in small letters."""
    return url.partition(":")[0].lower()


def redact(url: str) -> str:
    """``url`` without its password."""
    url = re.sub(r"(?i)([?&]password=)[^&]*", r"\1***", url)
    before, at, after = url.rpartition("@")
    if not at:
        return url
    scheme, _, credentials = before.partition("://")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{after}"


class Jittered(tenacity.wait.wait_base):
    """Waits up to a bound that doubles with every attempt, from ``_FIRST_WAIT`` to ``_LAST_WAIT``.

    As tenacity's own, but with draws of its own: a program's seeded ``random`` stays as it is.
    """

    def __init__(self) -> None:
        self._random = random.Random()

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        bound = min(_LAST_WAIT, _FIRST_WAIT * 2.0 ** (retry_state.attempt_number - 1))
        return self._random.uniform(0.0, bound)


def retrying(
    call: Callable[[], T],
    url: str,
    *,
    seconds: float = RETRY_SECONDS,
    away_seconds: float | None = None,
    while_: Callable[[BaseException], bool] = passes,
) -> T:
    """``call()``, retried for at most ``seconds`` while the broker is away or refuses for now.

    ``away_seconds``: while it is away, if that is to be another time.

    Only for calls that may be sent twice: reads with a cursor, and scripts that return DUP; others
    with ``while_`` ``is_refused_for_now``.
    """
    began = time.monotonic()
    try:
        return call()  # the hot path builds no policy
    except redis.RedisError as error:
        spent = time.monotonic() - began
        if not while_(error) or spent >= _limit_of(error, seconds, away_seconds):
            raise translate(error, url) from None
    policy = tenacity.Retrying(
        retry=tenacity.retry_if_exception(while_),
        wait=Jittered(),
        stop=stop_after(seconds, away_seconds),
        reraise=True,
    )
    try:
        return policy(call)
    except redis.RedisError as error:
        raise translate(error, url) from None


def stop_after(seconds: float, away_seconds: float | None) -> Callable[[Any], bool]:
    """When ``retrying`` ends."""

    def is_late(state: tenacity.RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        return (state.seconds_since_start or 0.0) >= _limit_of(error, seconds, away_seconds)

    return is_late


def _limit_of(error: object, seconds: float, away_seconds: float | None) -> float:
    """How long a call that has failed with ``error`` is retried."""
    return seconds if away_seconds is None or is_refused_for_now(error) else away_seconds


def translate(error: redis.RedisError, url: str) -> BrokerError:
    """The BrokerError for an error of redis-py."""
    return error_of(error, redact(url))
