"""``flowspec submit | watch | cancel``: jobs of a running pipeline."""

from __future__ import annotations

import sys
import time

from flowspec.async_client import no_job, no_scheduler
from flowspec.cli import notes
from flowspec.cli.places import url_or_running
from flowspec.cli.show import Screen
from flowspec.client import Client, Job
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ClusterError, FlowSpecError, JobError
from flowspec.strategies import build
from flowspec.transport.base import middles_of

#: How long the scheduler may take to see a job submitted elsewhere, seconds.
_KNOWN_SECONDS = 2.0


def submit(spec: JobSpec, url: str | None) -> None:
    """Submit and print the job's id."""
    with Client(url_or_running(url)) as client:
        record = client.pipeline()
        build(spec.strategy, int(record.get("stages", "1")))
        notes.alone(spec.strategy)
        notes.unused_middles(spec.strategy, middles_of(record), running=True)
        notes.cut(spec.max_new_tokens, client.workers())
        sys.stdout.write(client.submit_spec(spec).id + "\n")
        notes.waits(client)


def watch(job_id: str, url: str | None, *, as_json: bool, with_stats: bool) -> None:
    """Stream a job's output; interrupting does not end the job."""
    screen = Screen(as_json=as_json, with_stats=with_stats)
    with Client(url_or_running(url)) as client:
        job = _known(client, job_id)
        try:
            with screen.streaming(client) as show:
                for chunk in job.stream():
                    show(chunk)
        except (FlowSpecError, KeyboardInterrupt):
            screen.broken_off()
            raise
        screen.result(job.so_far())


def cancel(job_id: str, url: str | None) -> None:
    """Cancel a job and wait until it has ended."""
    with Client(url_or_running(url)) as client:
        job = _known(client, job_id)
        job.cancel()
        result = job.result()
        sys.stdout.write(
            f"{job_id} ended after {len(result.token_ids)} tokens ({result.finish_reason})\n"
        )


def _known(client: Client, job_id: str) -> Job:
    """The job, if it exists, else JobError; ClusterError if it waits for a missing scheduler."""
    deadline = time.monotonic() + _KNOWN_SECONDS
    while not client.knows(job_id):
        if time.monotonic() > deadline:
            _check_waits(client, job_id)
            break
        time.sleep(0.05)
    return client.job(job_id)


def _check_waits(client: Client, job_id: str) -> None:
    """Raise unless ``job_id``, which no scheduler has taken, waits for one that may take it."""
    if not client.submitted(job_id):
        raise JobError(no_job(job_id))
    if "scheduler" not in client.workers():
        raise ClusterError(no_scheduler(job_id))
