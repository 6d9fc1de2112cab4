"""A connection whose replies are read later: a read that waits, or writes under way.

A sender over a link of 25 ms would otherwise stand still for 50 ms after every write, and a reader
would ask for news in a round trip of its own. Commands that were sent and not answered when the
connection breaks are sent again, in order, over the next one: only commands that may be sent twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from flowspec.broker.connection import MAX_BLOCK_SECONDS, retrying, translate
from flowspec.broker.redis_client import Command, ConnectedClient, in_transaction, pack

#: Oldest that an unanswered batch may be before its reply is waited for, seconds: a server that
#: hangs is then noticed by the socket's timeout. Longer than any blocking read.
SILENT_SECONDS = MAX_BLOCK_SECONDS + 3.0


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Commands sent together, their bytes, and when."""

    data: bytes
    commands: int
    atomic: bool
    sent_at: float


class PipelinedClient(ConnectedClient):
    """One connection for one thread; replies come in the order of the batches.

    ``patient``: whether a lost connection is made again for some seconds; if not, the first loss is
    an error, BrokerUnreachable.
    """

    def __init__(self, url: str, *, patient: bool = True) -> None:
        super().__init__(url)
        self._patient = patient
        self._under_way: deque[_Batch] = deque()

    @property
    def under_way(self) -> int:
        """Batches sent and not answered."""
        return len(self._under_way)

    @property
    def silent(self) -> bool:
        """Whether the oldest batch has waited for its reply longer than any should."""
        oldest = self._under_way[0] if self._under_way else None
        return oldest is not None and time.monotonic() - oldest.sent_at > SILENT_SECONDS

    def fileno(self) -> int:
        """The socket's file descriptor; only valid while connected."""
        return int(self._connection._sock.fileno())

    def answered(self, seconds: float = 0.0) -> bool:
        """Whether ``collect`` has something to take or to raise, after at most ``seconds``."""
        if not self._under_way:
            return False
        if not self._connection.is_connected or self.silent:
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
        batch = _Batch(pack(sent), len(sent), atomic, time.monotonic())
        is_lost = bool(self._under_way) and not self._connection.is_connected
        self._under_way.append(batch)
        try:
            if is_lost:  # redis-py would connect again, and forget what was under way
                raise redis.ConnectionError("the connection was lost")
            self._transmit(batch.data)
        except (redis.ConnectionError, redis.TimeoutError) as lost:
            self._resume(lost, self._reconnect)

    def collect(self) -> list[Any]:
        """The replies to the oldest batch, waiting for them; errors of single commands as values.

        If the server lacks a script, all scripts are loaded and the batch is sent again.
        """
        answers = self._oldest_answers()
        if any(isinstance(answer, redis.exceptions.NoScriptError) for answer in answers):
            self.call(lambda client: self.load_scripts())
            retrying(lambda: self._guarded(self._reconnect), self.url)
            answers = self._oldest_answers()
        self._under_way.popleft()
        return answers

    def _oldest_answers(self) -> list[Any]:
        try:
            return self._read_oldest()
        except (redis.ConnectionError, redis.TimeoutError) as lost:
            return self._resume(lost, self._read_again)
        except redis.RedisError as error:
            raise translate(error, self.url) from None

    def _resume(self, lost: redis.RedisError, again: Callable[[], T]) -> T:
        """``again()`` over a new connection, tried for some seconds; BrokerUnreachable after it."""
        if not self._patient:
            raise translate(lost, self.url) from None
        self._broken = True
        return retrying(lambda: self._guarded(again), self.url)

    def _read_again(self) -> list[Any]:
        self._reconnect()
        return self._read_oldest()

    def _reconnect(self) -> None:
        """Connect again and send again what is under way."""
        self._connection.disconnect()
        self._connection.connect()
        for batch in self._under_way:
            self._transmit(batch.data)

    def _read_oldest(self) -> list[Any]:
        batch = self._under_way[0]
        answers = [self._reply() for _ in range(batch.commands)]
        if not batch.atomic:
            return answers
        executed = answers[-1]
        return list(executed) if isinstance(executed, list) else [executed] * (batch.commands - 2)
