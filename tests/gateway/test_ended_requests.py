"""Jobs whose request is over end in the background, whatever the broker answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowspec.errors import BrokerError
from flowspec.gateway import ended_requests
from flowspec.gateway.ended_requests import KEPT_SECONDS, EndedRequests


class Job:
    """A job of a client: what is done to it."""

    id = "j"

    def __init__(self, *, ended: bool = False, silent: bool = False, lost: bool = False) -> None:
        self.ended = ended
        self._silent = silent
        self._lost = lost
        self.done: list[object] = []

    async def cancel(self) -> None:
        if self._lost:
            raise BrokerError("the broker is gone")
        self.done.append("cancelled")

    async def stream(self) -> AsyncIterator[str]:
        yield "the end of its text"
        if self._silent:
            await asyncio.Event().wait()

    async def expire(self, seconds: float) -> None:
        self.done.append(seconds)


def ended(job: Any, *, submitting: bool = False) -> list[object]:
    """What was done to ``job`` until the gateway has closed."""

    async def run() -> None:
        requests = EndedRequests()
        await requests.close()
        if submitting:
            requests.end_submitted(asyncio.create_task(_submitted(job)))
        else:
            requests.end(job)
        await requests.close()
        await asyncio.sleep(0)
        assert len(requests) == 0

    asyncio.run(run())
    found: list[object] = job.done
    return found


async def _submitted(job: Any) -> Any:
    if job is REFUSED:
        raise BrokerError("the broker refused it")
    return job


REFUSED = Job()


@pytest.mark.parametrize("submitting", [False, True])
def test_a_running_job_is_cancelled_and_its_output_expires(submitting: bool) -> None:
    assert ended(Job(), submitting=submitting) == ["cancelled", KEPT_SECONDS]


def test_an_answered_job_expires_alone() -> None:
    assert ended(Job(ended=True)) == [KEPT_SECONDS]


def test_a_job_that_was_not_submitted_needs_no_end() -> None:
    assert ended(REFUSED, submitting=True) == []


def test_a_lost_broker_is_no_fault_of_the_gateway() -> None:
    assert ended(Job(lost=True)) == []


def test_the_end_of_a_job_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_requests, "END_SECONDS", 0.01)
    assert ended(Job(silent=True)) == ["cancelled"]
