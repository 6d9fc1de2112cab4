"""What error answers of Redis and Valkey that can come at any time mean: wait, reconnect, end.

Sources: ``addReplyError`` and ``shared`` in ``server.c`` of Valkey 9.1 and Redis 8. An answer is
never the effect of a command: whoever got one may send the command again. Of a lost connection
nobody knows whether the command was carried out.
"""

from __future__ import annotations

import enum
import os
import re
from typing import NamedTuple

import redis

from flowspec.errors import BrokerError, BrokerFull, BrokerUnreachable


class Course(enum.Enum):
    """What a caller does after an error."""

    WAIT = "send it again over the same connection"
    RECONNECT = "send it again over a new connection: its address may lead to another server now"
    END = "tell the user"


class _Meaning(NamedTuple):
    """``text`` follows `the broker at ADDRESS`; ``{}`` in it stands for the server's own words."""

    course: Course
    kind: type[BrokerError]
    text: str


#: The answer about a key that holds another type than the command is for.
WRONG_TYPE = "WRONGTYPE"
_NO_CLUSTER = _Meaning(
    Course.END,
    BrokerError,
    "is a node of a cluster; give the URL of one server that has all keys ({})",
)
_PASSWORD = _Meaning(
    Course.END, BrokerUnreachable, "refused the password; check the URL's user and password"
)
#: By code; what is not here is the answer to a wrong command.
ANSWERS = {
    "LOADING": _Meaning(Course.RECONNECT, BrokerUnreachable, "is still loading its data"),
    "BUSY": _Meaning(
        Course.WAIT,
        BrokerUnreachable,
        "is busy with somebody's script; wait for it, or end it with `redis-cli script kill`",
    ),
    "TRYAGAIN": _Meaning(Course.WAIT, BrokerUnreachable, "moves its keys: {}"),
    "CLUSTERDOWN": _Meaning(Course.WAIT, BrokerUnreachable, "is a node of a cluster that is down"),
    "READONLY": _Meaning(
        Course.RECONNECT,
        BrokerUnreachable,
        "is a replica, which takes no writes; give the URL of the primary",
    ),
    "MASTERDOWN": _Meaning(
        Course.RECONNECT, BrokerUnreachable, "is a replica that has lost its primary"
    ),
    "UNBLOCKED": _Meaning(Course.RECONNECT, BrokerUnreachable, "ended a read: {}"),
    "NOREPLICAS": _Meaning(
        Course.WAIT,
        BrokerFull,
        "takes no writes: it has fewer replicas than its min-replicas-to-write",
    ),
    "OOM": _Meaning(
        Course.WAIT, BrokerFull, "is out of memory; raise maxmemory or wait for jobs to end"
    ),
    "MISCONF": _Meaning(
        Course.WAIT,
        BrokerFull,
        "takes no writes, because it cannot save its data; look at its disk and its log",
    ),
    "MAXCLIENTS": _Meaning(
        Course.RECONNECT,
        BrokerUnreachable,
        "has no room for another connection; raise maxclients or close other programs",
    ),
    "NOAUTH": _PASSWORD,
    "WRONGPASS": _PASSWORD,
    "NOPERM": _Meaning(
        Course.END,
        BrokerError,
        "does not allow this user a command: {}; `flowspec acl` writes users that may do all it "
        "takes",
    ),
    "UNKNOWN": _Meaning(
        Course.END,
        BrokerError,
        "lacks a command: {}; it needs all of Redis 6.2 or Valkey, none renamed",
    ),
    "MOVED": _NO_CLUSTER,
    "ASK": _NO_CLUSTER,
    "CROSSSLOT": _NO_CLUSTER,
}
_OTHER = _Meaning(Course.END, BrokerError, "refused a command: {}")
#: Where an answer's code stands if another error is wrapped around it: a transaction's, or that of
#: a script before Redis 7.
_WRAPPED = re.compile(r"(?:because of: |: -)([A-Z]+)\b")
_NO_ROOM = "max number of clients reached"
#: How a server answers a command that it does not have, also in a script; it has no code for it.
_UNKNOWN = re.compile(r"(?i)\bunknown (?:redis )?command\b")
#: Schemes of URLs by which TLS is spoken.
_TLS = ("rediss", "valkeys")
#: How a script says that its caller may not run one of its commands.
_NOT_IN_SCRIPT = "ACL failure in script"


def code_of(error: redis.RedisError) -> str:
    """The code of the server's answer, ``OOM`` for example; empty: it is not an answer."""
    text = str(error)
    if text.startswith(_NO_ROOM) or text.endswith(_NO_ROOM):
        return "MAXCLIENTS"
    if _NOT_IN_SCRIPT in text:
        return "NOPERM"
    if _UNKNOWN.search(text):
        return "UNKNOWN"
    code = error.status_code or text.partition(" ")[0]
    if code in ("EXECABORT", "ERR") and (wrapped := _WRAPPED.search(text)):
        return wrapped[1]
    if isinstance(error, redis.AuthenticationError):
        return "NOAUTH"
    is_answer = error.status_code is not None or isinstance(error, redis.ResponseError)
    return code if is_answer else ""


def course_of(error: BaseException) -> Course:
    """What to do after ``error``; END for what is none of redis-py's."""
    if not isinstance(error, redis.RedisError):
        return Course.END
    code = code_of(error)
    if not code and isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return Course.RECONNECT
    return ANSWERS.get(code, _OTHER).course


def passes(error: BaseException) -> bool:
    """Whether the same command may succeed soon."""
    return course_of(error) is not Course.END


def is_refused_for_now(error: object) -> bool:
    """Whether ``error`` is an answer, so that nothing was carried out, and a retry may help."""
    return isinstance(error, redis.RedisError) and bool(code_of(error)) and passes(error)


def error_of(error: redis.RedisError, address: str) -> BrokerError:
    """The BrokerError for ``error``; ``address`` without a password."""
    reason = str(error).splitlines()[0].strip() if str(error) else type(error).__name__
    code = code_of(error)
    if not code and isinstance(error, redis.ConnectionError | redis.TimeoutError):
        # redis-py repeats the address, with whatever stands in it.
        cause = _refusal_of(error) or re.sub(r"^Error -?\d+ connecting to \S+ ", "", reason)
        cause = cause.rstrip(".")
        if isinstance(error, redis.TimeoutError) and address.partition(":")[0] in _TLS:
            cause += "; a port that is open, but silent, takes no TLS: use redis://"
        found: BrokerError = BrokerUnreachable(f"cannot reach the broker at {address}: {cause}")
        found.silent = address
        return found
    meaning = ANSWERS.get(code, _OTHER)
    found = meaning.kind(f"the broker at {address} {meaning.text.format(reason)}")
    found.code = code
    return found


def _refusal_of(error: redis.RedisError) -> str:
    """The system's words if it has refused the connection; asyncio puts its own in their place.

    Where a name has several addresses, asyncio tells the errors in one text.
    """
    under = error.__cause__ or error.__context__
    if isinstance(under, ConnectionError) and under.errno:
        return os.strerror(under.errno)
    numbers = re.findall(r"\[Errno (\d+)\]", str(under)) if isinstance(under, OSError) else []
    return os.strerror(int(numbers[0])) if len(numbers) > 1 else ""
