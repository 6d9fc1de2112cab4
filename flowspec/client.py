"""The Python client: submit jobs to a running pipeline, stream their tokens, cancel them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

from flowspec.core.protocol.causes import JOB_LOST
from flowspec.core.run.spec import (
    CANCEL,
    JobOptions,
    JobSpec,
    job_spec,
)
from flowspec.errors import BrokerUnreachable, ClusterError, JobError, JobFailed, JobTimeout
from flowspec.results import Chunk, OutputSoFar, Result
from flowspec.transport.base import OutputEntry
from flowspec.transport.connections.connection import DEFAULT_URL
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.inbox import FACT
from flowspec.transport.wire.keys import Keys

#: Silence of a job after which its client checks that a scheduler serves it, seconds. Longer than
#: the shortest lease, so that the first check notices a scheduler that has just died; on a busy
#: machine, where leases are longer, a later one does.
SILENCE_SECONDS = 8.0
#: How long a stream waits for a broker that cannot be reached, seconds; then it reads on where it
#: was. And the shortest time between two tries.
RECONNECT_SECONDS = 60.0
RECONNECT_LOOK_SECONDS = 0.2


def no_scheduler(job_id: str) -> str:
    """The error for a job that waits while no scheduler serves the pipeline."""
    return (
        f"job {job_id} waits and no scheduler serves the pipeline; start one, or look with "
        "`flowspec status`"
    )


def not_ended(job_id: str, seconds: float) -> str:
    """The error for a job whose caller has waited ``seconds`` for its end."""
    return f"job {job_id} has not ended within {seconds:g} s; it goes on: wait again, or cancel it"


def no_job(job_id: str) -> str:
    """The error for a job that the pipeline does not have."""
    return (
        f"there is no job {job_id}: it never existed, ended too long ago, or was lost when the "
        "broker was restarted without its data"
    )


class Job:
    """One job, by its id. Iterate ``stream()`` or call ``result()``; both end with the job."""

    def __init__(self, job_id: str, control: RedisControl) -> None:
        self._control = control
        self._output = OutputSoFar(job_id)
        self._silent_since = self._answered_at = time.monotonic()

    @property
    def id(self) -> str:
        """The job's id; that of an earlier submission, once it is known that this repeats it."""
        return self._output.job

    @property
    def cursor(self) -> str:
        """Where to continue reading the output."""
        return self._output.cursor

    @property
    def ended(self) -> bool:
        """Whether the end of the output has been read."""
        return self._output.ended

    @property
    def error(self) -> str:
        """Why the job failed, one line; empty: it has not."""
        return self._output.error

    def stream(self, timeout: float | None = None) -> Iterator[Chunk]:
        """Pieces of the output from its start, as they are committed.

        JobFailed if the job ends with an error; ClusterError if no scheduler serves the pipeline;
        JobTimeout if it has not ended ``timeout`` seconds after the first piece is asked for;
        BrokerUnreachable if the broker is away for RECONNECT_SECONDS.
        """
        if (chunk := self._output.chunk) is not None:
            yield chunk
        self._silent_since = self._answered_at = time.monotonic()
        deadline = math.inf if timeout is None else self._silent_since + timeout
        while not self.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise JobTimeout(not_ended(self.id, timeout or 0.0))
            yield from self._next(min(1.0, left))
        self._output.check()

    def _next(self, seconds: float) -> list[Chunk]:
        """What comes within ``seconds``; nothing while the broker is away for a while."""
        try:
            chunks = self.take_all(self._control.read_output(self.id, self.cursor, seconds))
        except BrokerUnreachable:
            self._silent_since = time.monotonic()
            if self._silent_since - self._answered_at > RECONNECT_SECONDS:
                raise
            time.sleep(RECONNECT_LOOK_SECONDS)
            return []
        self._answered_at = time.monotonic()
        return chunks

    def take_all(self, entries: Sequence[OutputEntry]) -> list[Chunk]:
        """The pieces of output in ``entries``, the result of a read; errors as in ``stream``."""
        now = time.monotonic()
        if entries:
            self._silent_since = now
        else:
            self._check_silence(now - self._silent_since)
        chunks = []
        reading = self.id
        for entry in entries:
            chunk = self._output.take(entry.cursor, entry.fields)
            if chunk is not None:
                chunks.append(chunk)
            if self.id != reading:
                break  # the output is that of an earlier submission, which this one repeats
        return chunks

    def _check_silence(self, seconds: float) -> None:
        """Raise ClusterError or JobFailed if a job silent for ``seconds`` will not go on."""
        if seconds < SILENCE_SECONDS:
            return
        if "scheduler" not in self._control.claims():
            raise ClusterError(no_scheduler(self.id))
        if not self._is_known():
            raise JobFailed(no_job(self.id), JOB_LOST)

    def _is_known(self) -> bool:
        """Whether the pipeline has the job, or it waits to be taken in."""
        # In this order: a job has its record before it leaves the intake.
        return self._control.submitted(self.id) or bool(self._control.job(self.id))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end, ``timeout`` seconds at most; errors as in ``stream``."""
        for _ in self.stream(timeout):
            continue
        return self.so_far()

    def so_far(self) -> Result:
        """The output read so far; ``finish_reason`` is empty unless the end has been read."""
        stages = int(self._control.pipeline().get("stages", "0"))
        return self._output.result(self._control.job(self.id), stages)

    def cancel(self) -> None:
        """Request the job's end; committed text stays. Harmless if it has ended.

        JobError if there is no such job.
        """
        if not self._is_known():
            raise JobError(no_job(self.id))
        self._control.submit({CANCEL: self.id})

    def recording(self) -> list[str]:
        """The lines of the job's recording, if it was submitted with ``record``."""
        return self._control.read_recording(self.id)


class Client:
    """A connection to a running pipeline.

    ``url``: the broker; default ``FLOWSPEC_REDIS_URL``, else localhost. BrokerUnreachable if it
    cannot be reached.
    """

    def __init__(self, url: str | None = None) -> None:
        self._control = RedisControl(
            url or os.environ.get("FLOWSPEC_REDIS_URL") or DEFAULT_URL, Keys()
        )

    def submit(self, prompt: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """Submit a job; JobError for values of a wrong type or out of range.

        ``messages``: a conversation like ``[{"role": "user", "content": "Hello"}]``, instead of a
        prompt. ``reuse``: begin with rows that are kept of earlier jobs with this ``cache_salt``,
        and keep this job's for later ones. ``logprobs``: return each token's log-probability and
        those of so many of the best ones in its place. Errors that only the pipeline can find (an
        unknown strategy, a prompt longer than the context) are raised as JobFailed by the job.
        """
        return self.submit_spec(job_spec(prompt, **options))

    def submit_spec(self, spec: JobSpec) -> Job:
        """Submit a checked spec."""
        return Job(self._control.submit(spec.fields()), self._control)

    def read(self, jobs: Sequence[Job], seconds: float = 1.0) -> None:
        """Read what there is of the outputs of ``jobs``; wait up to ``seconds`` if nothing is.

        The jobs' results so far then have it. ClusterError if no scheduler serves the pipeline.
        """
        read = {job.id: job for job in jobs}
        cursors = {name: job.cursor for name, job in read.items()}
        found = self._control.read_outputs(cursors, seconds)
        for name, job in read.items():
            job.take_all(found.get(name, []))

    def job(self, job_id: str) -> Job:
        """A job submitted before, here or elsewhere."""
        return Job(job_id, self._control)

    def knows(self, job_id: str) -> bool:
        """Whether the pipeline has the job, which expires some time after its end."""
        return bool(self._control.job(job_id))

    def submitted(self, job_id: str) -> bool:
        """Whether the job was submitted and no scheduler has taken it yet."""
        return self._control.submitted(job_id)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Facts of the workers that hold a lease, by role; without the passwords of inboxes."""
        return {
            role: {name: fact for name, fact in claim.facts.items() if name != FACT}
            for role, claim in self._control.claims().items()
        }

    def pipeline(self) -> dict[str, str]:
        """The pipeline's record; empty if there is none."""
        return self._control.pipeline()

    def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting jobs."""
        return len(self._control.running()), len(self._control.queued())

    def close(self) -> None:
        """Close the connections."""
        self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
