"""The blocking Python client: ``AsyncClient`` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar, Unpack

from flowspec.async_client import AsyncClient, AsyncJob
from flowspec.core.run.spec import JobOptions, JobSpec, job_spec
from flowspec.errors import ClientClosed
from flowspec.results import Chunk, Result
from flowspec.transport.connections.redis_client import CLOSED

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own, for calls from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._posting = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="flowspec-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        await self._closed.wait()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of ``call``, which ends with the wait; ClientClosed behind ``close``."""
        with self._posting:
            if self._closing:
                call.close()
                raise ClientClosed(CLOSED)
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosed(CLOSED) from None
        except BaseException:  # a signal has ended the wait
            future.cancel()
            raise

    def close(self) -> None:
        """End the calls that run, and the thread.

        A call that is posted behind the last one that the loop runs would never end.
        """
        with self._posting:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()


class Job:
    """``AsyncJob`` for callers that block."""

    def __init__(self, job: AsyncJob, loop: _Loop) -> None:
        self._job = job
        self._run = loop.run

    @property
    def id(self) -> str:
        """As ``AsyncJob.id``."""
        return self._job.id

    @property
    def ended(self) -> bool:
        """As ``AsyncJob.ended``."""
        return self._job.ended

    @property
    def error(self) -> str:
        """As ``AsyncJob.error``."""
        return self._job.error

    def stream(self, timeout: float | None = None) -> Iterator[Chunk]:
        """As ``AsyncJob.stream``."""
        chunks = self._job.stream(timeout)
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            with contextlib.suppress(ClientClosed):
                self._run(chunks.aclose())

    def result(self, timeout: float | None = None) -> Result:
        """As ``AsyncJob.result``."""
        return self._run(self._job.result(timeout))

    def so_far(self) -> Result:
        """As ``AsyncJob.so_far``."""
        return self._run(self._job.so_far())

    def cancel(self) -> None:
        """As ``AsyncJob.cancel``."""
        self._run(self._job.cancel())

    def expire(self, seconds: float) -> None:
        """As ``AsyncJob.expire``."""
        self._run(self._job.expire(seconds))

    def recording(self) -> list[str]:
        """As ``AsyncJob.recording``."""
        return self._run(self._job.recording())


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)


class Client:
    """``AsyncClient`` for callers that block, from any threads.

    Connects at once; BrokerUnreachable if that fails.
    """

    def __init__(self, url: str | None = None, *, follows: bool = False) -> None:
        self._client = AsyncClient(url, follows=follows)
        self._loop = _Loop()
        self._run = self._loop.run
        try:
            self._run(self._client.open())
        except BaseException:
            self.close()
            raise

    def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """As ``AsyncClient.submit``."""
        return self.submit_spec(job_spec(prompt, **options))

    def submit_spec(self, spec: JobSpec) -> Job:
        """As ``AsyncClient.submit_spec``."""
        return Job(self._run(self._client.submit_spec(spec)), self._loop)

    def job(self, job_id: str) -> Job:
        """As ``AsyncClient.job``."""
        return Job(self._client.job(job_id), self._loop)

    def knows(self, job_id: str) -> bool:
        """As ``AsyncClient.knows``."""
        return self._run(self._client.knows(job_id))

    def submitted(self, job_id: str) -> bool:
        """As ``AsyncClient.submitted``."""
        return self._run(self._client.submitted(job_id))

    def workers(self) -> dict[str, dict[str, Any]]:
        """As ``AsyncClient.workers``."""
        return self._run(self._client.workers())

    def lost(self) -> list[str]:
        """As ``AsyncClient.lost``."""
        return self._run(self._client.lost())

    def spares(self) -> list[dict[str, Any]]:
        """As ``AsyncClient.spares``."""
        return self._run(self._client.spares())

    def pipeline(self) -> dict[str, str]:
        """As ``AsyncClient.pipeline``."""
        return self._run(self._client.pipeline())

    def load(self) -> tuple[int, int]:
        """As ``AsyncClient.load``."""
        return self._run(self._client.load())

    def close(self) -> None:
        """As ``AsyncClient.close``."""
        with contextlib.suppress(ClientClosed):
            self._run(self._client.close())
        self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
