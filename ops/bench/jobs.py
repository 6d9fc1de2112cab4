"""A job that is only broker state, for benchmarks that act as its workers."""

from __future__ import annotations

import time

from flowspec.transport.control.redis_control import RedisControl


def running_job(control: RedisControl, *, stages: int) -> str:
    """The id of a job that runs under epoch 1 in a pipeline of ``stages`` that has no scheduler."""
    control.set_pipeline({"stages": str(stages)})
    control.join_intake()
    job = f"{time.time_ns() // 10**6}-0"
    control.admit(job, {"prompt": "x"})
    control.assign(job, 1, {})
    return job
