"""A pipeline's control and what clients do, in one object, for tests that play both parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from flowspec.transport.base import Control, OutputEntry
from flowspec.transport.control.async_control import AsyncRedisControl
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.control.replies import output_entries
from flowspec.transport.wire.entries import xread
from flowspec.transport.wire.keys import Keys

T = TypeVar("T")


class ControlAndClient(Control, Protocol):
    """``Control``, and the client's calls, which wait."""

    def submit(self, fields: Mapping[str, str]) -> str:
        """Append a job to the intake; its id."""
        ...

    def follow(self, jobs: Sequence[str], lifetime_ms: int) -> None:
        """Say for ``lifetime_ms`` that somebody waits for ``jobs``."""
        ...

    def submitted(self, job: str) -> bool:
        """Whether the intake holds ``job``: submitted, and not yet acknowledged."""
        ...

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        """Entries of a job's output after ``cursor`` (``0``: from the start)."""
        ...

    def read_recording(self, job: str) -> list[str]:
        """The recording of the job's newest recorded run, as lines."""
        ...


class RedisControlAndClient(RedisControl):
    """Both over the server at ``url``; a client of its own for every call."""

    def __init__(self, url: str, keys: Keys) -> None:
        super().__init__(url, keys)
        self._client_at = partial(AsyncRedisControl, url, keys)

    def submit(self, fields: Mapping[str, str]) -> str:
        return self._call(lambda client: client.submit(fields))

    def follow(self, jobs: Sequence[str], lifetime_ms: int) -> None:
        self._call(lambda client: client.follow(jobs, lifetime_ms))

    def submitted(self, job: str) -> bool:
        return self._call(lambda client: client.submitted(job))

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        stream = self._keys.out(job)
        (found,) = self._client.run([xread({stream: cursor}, block_seconds, 64)])
        return output_entries(found[0][1]) if found else []

    def read_recording(self, job: str) -> list[str]:
        return self._call(lambda client: client.read_recording(job))

    def _call(self, use: Callable[[AsyncRedisControl], Coroutine[Any, Any, T]]) -> T:
        async def call() -> T:
            client = self._client_at()
            try:
                return await use(client)
            finally:
                await client.close()

        return asyncio.run(call())
