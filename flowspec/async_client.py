"""The Python client: submit jobs to a running pipeline, stream their tokens, cancel them.

For one event loop; ``client.Client`` is the same for callers that block.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncGenerator
from typing import Any, Unpack

from flowspec.core.protocol.causes import JOB_LOST
from flowspec.core.run.spec import CANCEL, JobOptions, JobSpec, job_spec
from flowspec.errors import (
    BrokerError,
    BrokerUnreachable,
    ClusterError,
    JobError,
    JobFailed,
    JobTimeout,
)
from flowspec.observe import logger
from flowspec.results import Chunk, OutputSoFar, Result
from flowspec.transport.connections.connection import DEFAULT_URL
from flowspec.transport.control.async_control import AsyncRedisControl
from flowspec.transport.link.inbox import FACT
from flowspec.transport.wire.keys import Keys

#: Silence of a job after which its client checks that a scheduler serves it, seconds. Longer than
#: the shortest lease, so that the first check notices a scheduler that has just died; on a busy
#: machine, where leases are longer, a later one does.
SILENCE_SECONDS = 8.0
#: Checks in a row that find no scheduler before its client gives up: one that is started again, or
#: whose broker is, has no lease for some seconds.
UNSERVED_CHECKS = 2
#: How long a stream waits for a broker that cannot be reached, seconds; then it reads on where it
#: was. And the shortest time between two tries.
RECONNECT_SECONDS = 60.0
RECONNECT_LOOK_SECONDS = 0.2
#: How long a broker is away before its client says so, seconds.
AWAY_SECONDS = 3.0
#: How often a client that follows its jobs says so, seconds.
FOLLOW_SECONDS = 3.0


def no_scheduler(job_id: str) -> str:
    """The error for a job that waits while no scheduler serves the pipeline."""
    return (
        f"job {job_id} waits and no scheduler serves the pipeline; start one, or look with "
        "`flowspec status`"
    )


def no_job(job_id: str) -> str:
    """The error for a job that the pipeline does not have."""
    return (
        f"there is no job {job_id}: it never existed, ended too long ago, or was lost when the "
        "broker was restarted without its data"
    )


class AsyncJob:
    """One job, by its id. Iterate ``stream()`` or await ``result()``; both end with the job."""

    def __init__(self, job_id: str, control: AsyncRedisControl) -> None:
        self._control = control
        self._output = OutputSoFar(job_id)
        self._cancelled = False  # whether its end was asked for
        self._answered_at = time.monotonic()  # when the broker was last there

    @property
    def id(self) -> str:
        """The job's id; that of an earlier submission, once it is known that this repeats it."""
        return self._output.job

    @property
    def ended(self) -> bool:
        """Whether the end of the output has been read."""
        return self._output.ended

    @property
    def error(self) -> str:
        """Why the job failed, one line; empty: it has not."""
        return self._output.error

    async def stream(self, timeout: float | None = None) -> AsyncGenerator[Chunk, None]:
        """Pieces of the output from its start, as they are committed.

        JobFailed if the job ends with an error; ClusterError if no scheduler serves the pipeline;
        JobTimeout if it has not ended ``timeout`` seconds after the first piece is asked for;
        BrokerUnreachable if the broker is away for RECONNECT_SECONDS. Leaving the iteration early
        does not cancel the job.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if (chunk := self._output.chunk) is not None:
            yield chunk
        self._answered_at = time.monotonic()
        told = 0.0  # of which last answer's absence
        while not self.ended:
            try:
                async with contextlib.aclosing(self._follow(deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except BrokerUnreachable:
                away = time.monotonic() - self._answered_at
                if away > RECONNECT_SECONDS:
                    raise
                if away > AWAY_SECONDS and told != self._answered_at:
                    told = self._answered_at
                    logger(role="client").warning(
                        "broker away", job=self.id, tried_for_seconds=RECONNECT_SECONDS
                    )
                await asyncio.sleep(RECONNECT_LOOK_SECONDS)
            if not self.ended and time.monotonic() >= deadline:
                raise JobTimeout(
                    f"job {self.id} has not ended within {timeout:g} s; it goes on: wait again, "
                    "or cancel it"
                )
        self._output.check()

    async def _follow(self, deadline: float) -> AsyncGenerator[Chunk, None]:
        """Pieces of the output of ``id``, until it ends or turns out to be another job's.

        Or until ``deadline`` on the monotonic clock.
        """
        reading = self.id
        feed = await self._control.outputs.follow(reading, self._output.cursor)
        silent_since = time.monotonic()
        unserved = 0  # checks in a row that found no scheduler
        try:
            while not self.ended and (left := deadline - time.monotonic()) > 0:
                entries = await feed.take(min(SILENCE_SECONDS, left))
                self._answered_at = time.monotonic()
                if entries:
                    silent_since, unserved = time.monotonic(), 0
                elif time.monotonic() - silent_since >= SILENCE_SECONDS:
                    unserved = 0 if await self._is_served() else unserved + 1
                    if unserved == UNSERVED_CHECKS:
                        raise ClusterError(no_scheduler(self.id))
                for entry in entries:
                    chunk = self._output.take(entry.cursor, entry.fields)
                    if chunk is not None:
                        yield chunk
                    if self.id != reading:
                        return
        finally:
            self._control.outputs.leave(feed)

    async def _is_served(self) -> bool:
        """Whether a scheduler serves the pipeline; JobFailed if one does that lacks the job."""
        if "scheduler" not in await self._control.claims():
            return False
        if not await self._is_known():
            raise JobFailed(no_job(self.id), JOB_LOST)
        return True

    async def _is_known(self) -> bool:
        """Whether the pipeline has the job, or it waits to be taken in."""
        # In this order: a job has its record before it leaves the intake.
        return await self._control.submitted(self.id) or bool(await self._control.job(self.id))

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end, ``timeout`` seconds at most; errors as in ``stream``."""
        async for _ in self.stream(timeout):
            continue
        return await self.so_far()

    async def so_far(self) -> Result:
        """The output read so far; ``finish_reason`` is empty unless the end has been read."""
        stages = int((await self._control.pipeline()).get("stages", "0"))
        return self._output.result(await self._control.job(self.id), stages)

    async def cancel(self) -> None:
        """Request the job's end; committed text stays. Harmless if it has ended.

        JobError if there is no such job.
        """
        self._cancelled = True
        if not await self._is_known():
            raise JobError(no_job(self.id))
        await self._control.submit({CANCEL: self.id})

    async def expire(self, seconds: float) -> None:
        """Let the broker forget the ended job after ``seconds``, instead of an hour."""
        await self._control.expire(self.id, seconds)

    async def recording(self) -> list[str]:
        """The lines of the job's recording, if it was submitted with ``record``."""
        return await self._control.read_recording(self.id)


class AsyncClient:
    """A connection to a running pipeline, for one event loop.

    ``url``: the broker; default ``FLOWSPEC_REDIS_URL``, else localhost. Connects on ``open``, which
    ``async with`` does, else on the first call; BrokerUnreachable if that fails. ``follows``: the
    jobs it submits end with an error some 20 s after it was closed, has died or has lost the
    broker; else they go on without it.
    """

    def __init__(self, url: str | None = None, *, follows: bool = False) -> None:
        self._control = AsyncRedisControl(
            url or os.environ.get("FLOWSPEC_REDIS_URL") or DEFAULT_URL, Keys()
        )
        self._follows = follows
        self._followed: list[AsyncJob] = []
        self._renewing: asyncio.Task[None] | None = None

    async def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> AsyncJob:
        """Submit a job; JobError for values of a wrong type or out of range.

        ``messages``: a conversation like ``[{"role": "user", "content": "Hello"}]``, instead of a
        prompt. ``reuse``: begin with rows that are kept of earlier jobs with this ``cache_salt``,
        and keep this job's for later ones. ``logprobs``: return each token's log-probability and
        those of so many of the best ones in its place. Errors that only the pipeline can find (an
        unknown strategy, a prompt longer than the context) are raised as JobFailed by the job.
        """
        return await self.submit_spec(job_spec(prompt, **options))

    async def submit_spec(self, spec: JobSpec) -> AsyncJob:
        """Submit a checked spec."""
        job = AsyncJob(await self._control.submit(spec.fields()), self._control)
        if self._follows:
            await self._begin_to_follow(job)
        return job

    async def _begin_to_follow(self, job: AsyncJob) -> None:
        try:
            await self._control.follow([job.id])
        except BrokerError:
            with contextlib.suppress(BrokerError):
                await job.cancel()
            raise
        self._followed.append(job)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="following jobs")

    async def _renew(self) -> None:
        """Say again and again which jobs are waited for."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            self._followed = [job for job in self._followed if not (job.ended or job._cancelled)]
            if not self._followed:
                continue
            try:
                await self._control.follow([job.id for job in self._followed])
            except BrokerError as error:  # one that is away is so for the scheduler too
                logger(role="client").warning("jobs not followed", reason=str(error))

    def job(self, job_id: str) -> AsyncJob:
        """A job submitted before, here or elsewhere."""
        return AsyncJob(job_id, self._control)

    async def knows(self, job_id: str) -> bool:
        """Whether the pipeline has the job, which expires some time after its end."""
        return bool(await self._control.job(job_id))

    async def submitted(self, job_id: str) -> bool:
        """Whether the job was submitted and no scheduler has taken it yet."""
        return await self._control.submitted(job_id)

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Facts of the workers that hold a lease, by role; without the passwords of inboxes.

        ``generation``: how many have held the role so far, this one included.
        """
        return {
            role: {name: fact for name, fact in claim.facts.items() if name != FACT}
            | {"generation": claim.generation}
            for role, claim in (await self._control.claims()).items()
        }

    async def lost(self) -> list[str]:
        """Roles without a worker that had one, which died or was cut off."""
        return await self._control.lost()

    async def spares(self) -> list[dict[str, Any]]:
        """Workers that wait to take a stage whose worker is lost: ``roles``, ``host``, ``pid``."""
        return await self._control.spares()

    async def pipeline(self) -> dict[str, str]:
        """The pipeline's record; empty if there is none."""
        return await self._control.pipeline()

    async def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting jobs."""
        return await self._control.load()

    @property
    def following(self) -> int:
        """The number of jobs whose outputs are being read."""
        return self._control.outputs.following

    def end_waits(self, why: str) -> None:
        """End all streams and results that are waited for now, with WaitsEnded."""
        self._control.outputs.end_waits(why)

    async def open(self) -> None:
        """Connect."""
        await self._control.open()

    async def close(self) -> None:
        """Close the connections."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._control.close()

    async def __aenter__(self) -> AsyncClient:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
