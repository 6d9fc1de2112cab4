"""Jobs whose request is over: they are cancelled if they still run, and then forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from flowspec.async_client import AsyncJob
from flowspec.errors import FlowSpecError
from flowspec.observe import logger

#: How long the end of a cancelled job is waited for, seconds.
END_SECONDS = 30.0
#: How long the last ones are waited for when the gateway stops, seconds.
CLOSE_SECONDS = 5.0
#: How long an answered job stays readable, seconds: nobody reads it again but who looks for faults.
KEPT_SECONDS = 60.0


class EndedRequests:
    """Ends in the background the jobs of requests that are over."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = logger(role="gateway")

    def __len__(self) -> int:
        return len(self._tasks)

    def end(self, job: AsyncJob) -> None:
        """Let go of ``job``, whose answer nobody waits for any more."""
        self._start(self._end(job))

    def end_submitted(self, submitting: asyncio.Task[AsyncJob]) -> None:
        """The same of a job that is just being submitted."""
        self._start(self._end_submitted(submitting))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="ending job")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_submitted(self, submitting: asyncio.Task[AsyncJob]) -> None:
        with contextlib.suppress(FlowSpecError):
            await self._end(await submitting)

    async def _end(self, job: AsyncJob) -> None:
        try:
            if not job.ended:
                await job.cancel()
                await self._wait(job)
            await job.expire(KEPT_SECONDS)
        except (FlowSpecError, TimeoutError) as error:
            self._log.warning("job not ended", job=job.id, reason=str(error))

    async def _wait(self, job: AsyncJob) -> None:
        async with asyncio.timeout(END_SECONDS):
            async for _ in job.stream():
                continue

    async def close(self) -> None:
        """Wait for a bounded time until all are ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
