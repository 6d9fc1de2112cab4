"""Causes of an error in a job's output, for programs."""

from __future__ import annotations

#: The job cannot be served as it is.
REFUSED = "refused"
#: Its prompt does not fit the model's context.
TOO_LONG = "too_long"
#: The queue is full.
FULL = "full"
#: A worker was lost.
LOST = "lost"
#: The broker has the job no more: it was restarted without its data, or the job expired.
JOB_LOST = "job_lost"
#: The job did not begin within its ``wait_seconds``.
LATE = "late"
#: Something failed on the way.
FAILED = "failed"

#: The error of a job that is ``LATE``.
NOT_BEGUN = "the job did not begin within its wait_seconds"
