"""What wakes a scheduler that waits for a change, and how soon; over both brokers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Finish
from flowspec.core.run.key import RunKey
from flowspec.transport.base import Link
from flowspec.transport.control import redis_control
from tests.addresses import D0
from tests.clients import ControlAndClient
from tests.transport.conftest import Rig
from tests.waiting import SECONDS, seconds_of

#: How long a scheduler waits that nothing wakes, seconds: so long that a busy machine is not taken
#: for one.
POLL = SECONDS
#: Seconds within which a waiting scheduler must wake.
SOON = POLL / 2


@pytest.fixture(autouse=True)
def long_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_control, "MAX_BLOCK_SECONDS", POLL)


Event = Callable[[], object]
Prepare = Callable[[Rig, ControlAndClient, Link], Event]


def admission(rig: Rig, control: ControlAndClient, draft: Link) -> Event:
    job = control.submit({"prompt": "p"})
    return lambda: control.admit(job, {"prompt": "p"})


def the_end_of_a_job(rig: Rig, control: ControlAndClient, draft: Link) -> Event:
    job = rig.start(control, draft)
    return lambda: draft.write([Finish(RunKey(job, 1), "eos", "", {})])[0]


def the_end_of_a_job_that_failed(rig: Rig, control: ControlAndClient, draft: Link) -> Event:
    job = rig.start(control, draft)
    return lambda: draft.write([Finish(RunKey(job, 1), "error", "stage 2 is gone", {})])[0]


def a_revocation(rig: Rig, control: ControlAndClient, draft: Link) -> Event:
    job = rig.start(control, draft)
    return lambda: control.revoke(job, "error", "a worker was lost")


def the_revocation_of_a_waiting_job(rig: Rig, control: ControlAndClient, draft: Link) -> Event:
    job = control.submit({"prompt": "p"})
    control.admit(job, {"prompt": "p"})
    return lambda: control.revoke(job, "cancelled")


EVENTS = (
    admission,
    the_end_of_a_job,
    the_end_of_a_job_that_failed,
    a_revocation,
    the_revocation_of_a_waiting_job,
)


def wait(control: ControlAndClient, seconds: float) -> float:
    """Seconds that a wait for a change took."""
    return seconds_of(lambda: control.wait_for_change(seconds))


@pytest.mark.parametrize("prepare", EVENTS, ids=lambda prepare: prepare.__name__)
def test_a_scheduler_that_waits_is_woken_soon(rig: Rig, prepare: Prepare) -> None:
    control = rig.control()
    draft = rig.link(D0)
    event = prepare(rig, control, draft)
    wait(control, 0.01)
    assert wait(control, 0.05) >= 0.045, "nothing has changed"
    codes: list[object] = []
    begun = threading.Event()

    def later() -> None:
        begun.set()
        codes.append(event())

    timer = threading.Timer(0.2, later)
    timer.start()
    assert wait(control, POLL) < SOON
    assert begun.is_set(), "by nothing"
    timer.join()
    assert codes == [Code.OK]


@pytest.mark.parametrize("prepare", EVENTS, ids=lambda prepare: prepare.__name__)
def test_a_change_between_two_waits_is_not_lost_and_wakes_once(rig: Rig, prepare: Prepare) -> None:
    control = rig.control()
    draft = rig.link(D0)
    event = prepare(rig, control, draft)
    wait(control, 0.01)
    assert event() is Code.OK
    assert wait(control, POLL) < SOON
    assert wait(control, 0.05) >= 0.045, "it was told already"


def test_several_changes_between_two_waits_are_one_waking(rig: Rig) -> None:
    control = rig.control()
    jobs = [control.submit({"prompt": str(at)}) for at in range(3)]
    wait(control, 0.01)
    for job in jobs:
        assert control.admit(job, {"prompt": "p"}) is Code.OK
    assert wait(control, POLL) < SOON
    assert wait(control, 0.05) >= 0.045


def test_what_changes_nothing_wakes_nobody(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([Finish(RunKey(job, 1), "eos", "", {})])
    wait(control, 0.01)
    assert control.admit(job, {"prompt": "p"}) is Code.DUP
    assert draft.write([Finish(RunKey(job, 1), "eos", "", {})]) == [Code.STALE]
    assert control.revoke(job, "cancelled") is Code.DUP
    assert wait(control, 0.05) >= 0.045


def test_a_submission_that_is_refused_wakes_nobody(rig: Rig) -> None:
    """It was never queued, and its end frees no slot."""
    control = rig.control()
    job = control.submit({"prompt": ""})
    assert control.admit(job, {"prompt": ""}, "the prompt is empty") is Code.OK
    assert wait(control, 0.05) >= 0.045


def test_every_control_is_woken(rig: Rig) -> None:
    """A scheduler that takes over also sees what its predecessor was notified of."""
    first = rig.control()
    second = rig.control()
    job = first.submit({"prompt": "p"})
    first.admit(job, {"prompt": "p"})
    assert wait(first, POLL) < SOON
    assert wait(second, POLL) < SOON
