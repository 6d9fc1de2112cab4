"""A full queue: all jobs are answered, and nothing of them stays for ever."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.transport.base import QUEUE_CAP
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.served import toy_pipeline
from tests.toy import TARGET

TOKENS = 4
#: What the broker's allocator may keep of memory that was freed, and its own records, bytes.
SLACK_BYTES = 1 << 20


def prompt(number: int) -> tuple[int, ...]:
    return (5, 6, 7, 5 + number % 30)


@pytest.mark.parametrize("waiting", [150, pytest.param(QUEUE_CAP, marks=pytest.mark.heavy)])
def test_waiting_jobs_are_answered_and_leave_nothing(waiting: int) -> None:
    with PrivateBroker() as broker:
        server: Any = connect(broker.url)
        control = RedisControl(broker.url, Keys())
        with toy_pipeline(broker.url, endless=True) as pipeline:
            pipeline.run(JobSpec(prompt_ids=prompt(0), max_new_tokens=TOKENS))
            used = server.info("memory")["used_memory"]
            before = set(server.scan_iter("*"))
            jobs = [
                pipeline.submit(JobSpec(prompt_ids=prompt(number), max_new_tokens=TOKENS))
                for number in range(waiting)
            ]
            for number, job in enumerate(jobs):
                ids, end, _ = pipeline.wait(job)
                assert end["finish_reason"] == "length"
                assert ids == TARGET.decode(prompt(number), TOKENS, Sampling())
            assert control.running() == []
            assert control.queued() == []
            left = set(server.scan_iter("*")) - before
            assert all(server.ttl(key) > 0 for key in left), "a key of an ended job stays for ever"
            server.delete(*left)  # as the end of their retention would
            server.memory_purge()
            assert server.info("memory")["used_memory"] < used + SLACK_BYTES
        control.close()
        server.close()
