"""The asynchronous twin of ``redis_client.BrokerClient``: the same retries, the same safety."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio as aio
import tenacity
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from flowspec.errors import ClientClosed
from flowspec.transport.connections.answers import Course, course_of, is_refused_for_now, passes
from flowspec.transport.connections.connection import (
    FIRST_SECONDS,
    OPTIONS,
    RETRY_SECONDS,
    Jittered,
    checked_url,
    stop_after,
    translate,
)
from flowspec.transport.connections.redis_client import CLOSED, Command, without_errors

T = TypeVar("T")

#: Most connections of one client; further calls wait for a free one.
MOST_CONNECTIONS = 8


class AsyncBrokerClient:
    """A client with retries, for one event loop.

    A server that was restarted is used on, with whatever it has kept.
    """

    def __init__(self, url: str, *, connections: int = MOST_CONNECTIONS) -> None:
        self.url = url
        with checked_url(url) as known:
            pool = aio.BlockingConnectionPool.from_url(
                known,
                max_connections=connections,
                timeout=None,
                retry=Retry(NoBackoff(), 0),
                **OPTIONS,
            )
        self._redis = aio.Redis(connection_pool=pool)
        self._broken = False
        self._closed = False
        self._is_open = False
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Connect; BrokerUnreachable if that fails. Every call does so if it was not done."""
        async with self._opening:
            if not self._is_open:
                await self._retried(self._ask_server, away_seconds=FIRST_SECONDS)
                self._is_open = True

    async def run(self, *commands: Command) -> list[Any]:
        """The replies to ``commands``, sent in order in one round trip; they may be sent twice."""
        if not self._is_open:
            await self.open()

        async def send() -> list[Any]:
            return await self._send(commands)

        return await self._retried(send)

    async def once(self, command: Command) -> Any:
        """As ``BrokerClient.once``."""
        if not self._is_open:
            await self.open()

        async def send() -> list[Any]:
            if self._broken:  # before it is sent, a server that is away is waited for
                await self._retried(self._ask_server)
            return await self._send([command])

        return (await self._retried(send, while_=is_refused_for_now))[0]

    async def _retried(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        *,
        away_seconds: float | None = None,
        while_: Callable[[BaseException], bool] = passes,
    ) -> T:
        """As ``connection.retrying``."""
        policy = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(while_),
            wait=Jittered(),
            stop=stop_after(RETRY_SECONDS, away_seconds),
            reraise=True,
        )
        try:
            return await policy(call)
        except redis.RedisError as error:
            raise translate(error, self.url) from None

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        if self._closed:
            raise ClientClosed(CLOSED)
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers = without_errors(await cancellable(pipeline.execute(raise_on_error=False)))
            self._broken = False
            return answers
        except redis.RedisError as error:
            if course_of(error) is Course.RECONNECT:
                self._broken = True
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise

    async def _ask_server(self) -> None:
        await self._send([("INFO", "server")])  # a server that cannot save refuses PING

    async def close(self) -> None:
        """Close the connections; every later call raises ClientClosed."""
        self._closed = True
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


async def cancellable(call: Awaitable[T]) -> T:
    """The result of ``call``; CancelledError if the task was cancelled meanwhile.

    redis-py writes with ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that comes
    together with the result: the task would go on, and whoever cancelled it wait for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await call
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result
