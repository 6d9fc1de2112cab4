"""A connection whose replies are read later: a read that waits, or writes under way.

A sender over a link of 25 ms would otherwise stand still for 50 ms after every write, and a reader
would ask for news in a round trip of its own. Commands that were sent and not answered when the
connection breaks are sent again, in order, over the next one: only commands that may be sent twice.
So are those that the server refuses for now, as one that is full does, and behind them the scripts
that found something missing before them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import redis

from flowspec.core.protocol.codes import Code
from flowspec.errors import BrokerError
from flowspec.transport.connections.answers import Course, course_of, is_refused_for_now
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS, retrying, translate
from flowspec.transport.connections.redis_client import (
    Command,
    ConnectedClient,
    in_transaction,
    pack,
)

#: Oldest that an unanswered batch may be before its reply is waited for, seconds: a server that
#: hangs is then noticed by the socket's timeout. Longer than any blocking read.
SILENT_SECONDS = MAX_BLOCK_SECONDS + 3.0
#: Codes of scripts that changed nothing; what was refused before them may have been missing.
_UNCHANGED = (Code.GAP, Code.STALE, Code.FULL)

T = TypeVar("T")


@dataclass(slots=True)
class _Batch:
    """Commands sent together, their bytes, and when; ``answers``: None until they are read."""

    data: bytes
    commands: int
    atomic: bool
    sent_at: float = 0.0
    answers: list[Any] | None = None

    @property
    def refusal(self) -> redis.RedisError | None:
        """The first answer by which a command is to be sent again."""
        found = (answer for answer in self.answers or () if _is_to_repeat(answer))
        return next(found, None)

    @property
    def changed_nothing(self) -> bool:
        """Whether a script has answered by a code of _UNCHANGED."""
        codes = (answer if isinstance(answer, list) else [answer] for answer in self.answers or ())
        return any(isinstance(code, int) and code in _UNCHANGED for part in codes for code in part)


class PipelinedClient(ConnectedClient):
    """One connection for one thread; replies come in the order of the batches.

    ``patient``: whether a lost connection is made again, for some seconds; if not, the first loss
    is an error, BrokerUnreachable.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        super().__init__(url)
        self._patient = patient
        self._given_up = False
        self._under_way: deque[_Batch] = deque()

    @property
    def under_way(self) -> int:
        """Batches sent and not answered."""
        return len(self._under_way)

    @property
    def silent(self) -> bool:
        """Whether the oldest batch has waited for its reply longer than any should."""
        oldest = self._under_way[0] if self._under_way else None
        return (
            oldest is not None
            and oldest.answers is None
            and time.monotonic() - oldest.sent_at > SILENT_SECONDS
        )

    def fileno(self) -> int:
        """The socket's file descriptor; only valid while connected."""
        return int(self._connection._sock.fileno())  # redis-py has no public name for it

    def answered(self, seconds: float = 0.0) -> bool:
        """Whether ``collect`` has something to take or to raise, after at most ``seconds``."""
        if not self._under_way:
            return False
        if (
            self._under_way[0].answers is not None
            or not self._connection.is_connected
            or self.silent
        ):
            return True
        try:
            return bool(self._connection.can_read(max(0.0, seconds)))
        except redis.ConnectionError:
            return True

    def post(self, commands: Sequence[Command], *, atomic: bool = False) -> None:
        """Send ``commands``; ``collect`` returns their replies.

        ``atomic``: as one transaction, so that a blocked reader sees the effects of all or none.
        """
        sent = in_transaction(commands) if atomic else commands
        batch = _Batch(pack(sent), len(sent), atomic)
        is_lost = bool(self._under_way) and not self._connection.is_connected
        self._under_way.append(batch)
        try:
            if is_lost:  # redis-py would connect again, and forget what was under way
                raise redis.ConnectionError("the connection was lost")
            self._send_batch(batch)
        except (redis.ConnectionError, redis.TimeoutError) as lost:
            self._resume(lost, self._reconnect)

    def collect(self, *, at_once: bool = False) -> list[Any]:
        """The replies to the oldest batch, waiting for them; errors of single commands as values.

        What the server refuses for now is sent again for some seconds, unless ``at_once``; if it
        lacks a script, all scripts are loaded first. BrokerError if it goes on refusing: what is
        still under way is not waited for as long again.
        """
        batch = self._under_way[0]
        self._read(batch)
        if batch.refusal is not None and not (at_once or self._given_up):
            try:
                retrying(self._send_again, self.url)
            except BrokerError:
                self._given_up = True
                raise
        self._under_way.popleft()
        assert batch.answers is not None
        return batch.answers

    def _send_again(self) -> None:
        """Send what was refused once more; raise the oldest batch's refusal if it is again."""
        self._read(self._under_way[-1])
        refusals = [error for batch in self._under_way if (error := batch.refusal) is not None]
        if any(isinstance(error, redis.exceptions.NoScriptError) for error in refusals):
            self.call(lambda client: self.load_scripts())
        if any(course_of(error) is Course.RECONNECT for error in refusals):
            self._leave()
            self._guarded(self._reconnect)
        else:
            self._send_open()
        oldest = self._under_way[0]
        self._read(oldest)
        if oldest.refusal is not None:
            raise oldest.refusal

    def _read(self, last: _Batch) -> None:
        """Read the replies up to those to ``last``."""
        try:
            self._read_through(last)
        except (redis.ConnectionError, redis.TimeoutError) as lost:
            self._resume(lost, lambda: self._read_again(last))

    def _read_through(self, last: _Batch) -> None:
        for batch in self._under_way:
            if batch.answers is None:
                batch.answers = self._replies(batch)
            if batch is last:
                return

    def _resume(self, lost: redis.RedisError, again: Callable[[], T]) -> T:
        """``again()`` over a new connection, tried for some seconds; BrokerUnreachable after it."""
        if not self._patient:
            raise translate(lost, self.url) from None
        self._leave()
        return retrying(lambda: self._guarded(again), self.url)

    def _read_again(self, last: _Batch) -> None:
        self._reconnect()
        self._read_through(last)

    def _reconnect(self) -> None:
        """Connect again and send again what has had no effect, as far as is known."""
        self._connection.disconnect()
        self._connection.connect()
        self._send_open()

    def _send_open(self) -> None:
        """Send again, in order, what is not answered, was refused, or missed what was refused."""
        is_behind = False
        for batch in self._under_way:
            is_refused = batch.refusal is not None
            if batch.answers is None or is_refused or (is_behind and batch.changed_nothing):
                batch.answers = None
                self._send_batch(batch)
            is_behind = is_behind or is_refused

    def _send_batch(self, batch: _Batch) -> None:
        batch.sent_at = time.monotonic()
        self._transmit(batch.data)

    def _replies(self, batch: _Batch) -> list[Any]:
        answers = [self._reply() for _ in range(batch.commands)]
        if not batch.atomic:
            return answers
        executed = answers[-1]
        if isinstance(executed, list):
            return executed
        # A command that was refused before EXEC says more than what it makes of EXEC.
        cause = next(answer for answer in answers if isinstance(answer, redis.RedisError))
        return [cause] * (batch.commands - 2)


def _is_to_repeat(answer: object) -> TypeGuard[redis.RedisError]:
    """Whether ``answer`` says that its command has had no effect, and may have one soon."""
    return is_refused_for_now(answer) or isinstance(answer, redis.exceptions.NoScriptError)
