"""The scheduler's decisions, turn by turn, over both brokers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import redis

from flowspec import observe
from flowspec.core.protocol.causes import LATE
from flowspec.core.protocol.codes import Code
from flowspec.errors import BrokerError, BrokerFull, ConfigError
from flowspec.roles.scheduler import Scheduler
from flowspec.transport.base import Intake, setup_of
from flowspec.transport.connections import redis_client
from flowspec.transport.connections.connection import retrying
from flowspec.transport.wire.keys import JOBS, Keys
from tests.clients import ControlAndClient
from tests.transport.conftest import Rig
from tests.waiting import SECONDS, until

ROLES = ("draft", "verify-1", "verify-2")
OVER_REDIS = pytest.mark.parametrize("rig", ["redis"], indirect=True)


class Clock:
    """Passes as a test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(control: ControlAndClient, *roles: str, token: str = "t", state: str = "ready") -> None:
    for role in roles:
        setup = setup_of(control.pipeline())
        facts = {"state": state, "setup": setup}
        assert control.claim(role, f"{token}-{role}", facts, 3_600_000)


def generations(control: ControlAndClient) -> dict[str, int]:
    """Those of the workers, by role."""
    claims = control.claims()
    return {role: claims[role].generation for role in ROLES}


def submit(scheduler: Scheduler, control: ControlAndClient, **fields: str) -> str:
    job = control.submit(fields or {"prompt": "p"})
    for intake in control.read_intake(1.0):
        scheduler.admit(intake)
    return job


def last(control: ControlAndClient, job: str) -> tuple[str, str]:
    """The error and the finish reason in a job's output."""
    entries = [entry.fields for entry in control.read_output(job, "0", 0.2)]
    error = next((entry["text"] for entry in entries if entry["kind"] == "error"), "")
    return error, entries[-1].get("finish_reason", "") if entries else ""


def test_jobs_start_when_every_worker_is_ready_and_there_is_room(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=2)
    jobs = [submit(scheduler, control) for _ in range(3)]
    scheduler.turn()
    assert control.running() == []
    lease(control, *ROLES[:2])
    lease(control, ROLES[2], state="loading")
    scheduler.turn()
    assert control.running() == [], "a worker that is loading cannot serve"
    lease(control, ROLES[2])
    scheduler.turn()
    assert control.running() == sorted(jobs[:2])
    assert control.queued() == jobs[2:]


def test_the_highest_priority_begins_first_and_of_equal_ones_the_oldest(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=1)
    lease(control, *ROLES)
    jobs = [submit(scheduler, control, prompt="p", priority=at) for at in ("-1", "0", "2", "2")]
    begun = []
    for _ in jobs:
        scheduler.turn()
        (running,) = control.running()
        begun.append(running)
        assert control.revoke(running, "cancelled") is Code.OK
    assert begun == [jobs[2], jobs[3], jobs[1], jobs[0]]


def test_a_job_that_has_not_begun_in_time_ends(rig: Rig, clock: Clock) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=1, clock=clock)
    lease(control, *ROLES)
    first = submit(scheduler, control, prompt="p", wait_seconds="0.05")
    late = submit(scheduler, control, prompt="p", wait_seconds="0.05")
    patient = submit(scheduler, control)
    scheduler.turn()
    clock.now += 0.1
    scheduler.turn()
    assert control.running() == [first], "it had begun"
    assert control.queued() == [patient]
    assert last(control, late) == ("the job did not begin within its wait_seconds", "error")
    (error, _) = [entry.fields for entry in control.read_output(late, "0", 0.2)]
    assert error["cause"] == LATE


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_a_job_that_lost_a_worker_waits_for_another(rig: Rig, how: str) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.0 if how == "gone" else 60.0)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    later = submit(scheduler, control)
    scheduler.turn()
    assert control.running() == [job]
    before = control.holders(job)
    control.release("verify-2", "t-verify-2")
    if how == "gone":
        scheduler.turn()
        assert control.running() == []
        assert control.queued() == [job, later]
    lease(control, "verify-2", token="new")
    scheduler.turn()
    assert control.running() == [job], "it goes on before those that wait"
    assert last(control, job) == ("", "")
    after = control.holders(job)
    assert after == generations(control)
    assert after == {**before, "verify-2": after["verify-2"]}
    assert after["verify-2"] > before["verify-2"]


@pytest.mark.parametrize(("leaves", "told"), [(True, "worker left"), (False, "worker lost")])
def test_a_worker_that_hands_its_job_on_is_not_told_as_lost(
    rig: Rig,
    leaves: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLOWSPEC_LOG", "info")
    observe.configure()
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.0)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    control.release("verify-2", "t-verify-2", leaves=leaves)
    scheduler.turn()
    monkeypatch.undo()
    observe.configure()
    assert control.queued() == [job]
    said = capsys.readouterr().err
    assert told in said and said.count("worker l") == 1


def test_a_job_whose_workers_are_lost_again_and_again_ends(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.0)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    for attempt in range(3):
        scheduler.turn()
        assert control.running() == [job], attempt
        control.release("verify-2", f"{attempt or 't'}-verify-2")
        lease(control, "verify-2", token=str(attempt + 1))
    scheduler.turn()
    assert control.running() == control.queued() == []
    assert last(control, job) == (
        "the worker of verify stage 2 was lost, and the job had lost 2 workers before; "
        "submit the job again",
        "error",
    )


def test_workers_that_leave_on_purpose_are_no_attempts(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.0)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    for attempt in range(6):
        scheduler.turn()
        assert control.running() == [job], attempt
        control.release("verify-2", f"{attempt or 't'}-verify-2", leaves=True)
        lease(control, "verify-2", token=str(attempt + 1))


def test_a_job_that_goes_on_does_not_end_for_having_begun_late(rig: Rig, clock: Clock) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.0, clock=clock)
    lease(control, *ROLES)
    job = submit(scheduler, control, prompt="p", wait_seconds="0.05")
    scheduler.turn()
    control.release("verify-2", "t-verify-2")
    scheduler.turn()
    clock.now += 0.1
    scheduler.turn()
    assert control.queued() == [job]


def test_a_job_waits_for_a_worker_that_loads(rig: Rig, clock: Clock) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, incomplete_seconds=0.1, clock=clock)
    lease(control, "draft", "verify-1")
    lease(control, "verify-2", state="loading")
    job = submit(scheduler, control)
    for _ in range(3):
        scheduler.turn()
        clock.now += 0.1
    assert control.queued() == [job]


def test_a_worker_whose_lease_expired_may_be_late_before_it_is_lost(rig: Rig, clock: Clock) -> None:
    """A starved worker that renews in time keeps its job; one that stays away is lost."""
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.2, clock=clock)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    for _ in range(2):  # late twice, and never for long
        control.release("verify-2", "t-verify-2")
        scheduler.turn()
        lease(control, "verify-2")
        scheduler.turn()
        clock.now += 0.25
    assert control.running() == [job]
    control.release("verify-2", "t-verify-2")
    scheduler.turn()
    assert control.running() == [job]
    clock.now += 0.25
    scheduler.turn()
    assert control.running() == []


def test_jobs_do_not_wait_for_ever_for_workers_nobody_starts(rig: Rig, clock: Clock) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, incomplete_seconds=0.1, clock=clock)
    lease(control, "draft", "verify-1")
    job = submit(scheduler, control)
    scheduler.turn()
    assert control.queued() == [job]
    clock.now += 0.15
    scheduler.turn()
    error, reason = last(control, job)
    assert error == (
        "no worker of verify stage 2 for 0.1 s; start one with `python -m workers.verify --stage 2`"
    )
    assert reason == "error"


def test_a_pipeline_that_was_complete_meanwhile_starts_the_wait_anew(
    rig: Rig, clock: Clock
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, incomplete_seconds=0.2, clock=clock)
    scheduler.turn()
    clock.now += 0.25
    lease(control, *ROLES)
    scheduler.turn()
    control.release("draft", "t-draft")
    job = submit(scheduler, control)
    scheduler.turn()
    assert control.queued() == [job]


def test_a_scheduler_started_again_adopts_what_runs(rig: Rig) -> None:
    control = rig.control()
    lease(control, *ROLES)
    first = Scheduler(control, 2)
    job = submit(first, control)
    first.turn()
    second = Scheduler(control, 2, late_seconds=0.0)
    second.turn()
    assert control.running() == [job]
    control.release("draft", "t-draft")
    second.turn()
    assert control.queued() == [job]


@pytest.mark.parametrize(
    ("intake", "says"),
    [
        (
            Intake("9-0", {"prompt": "x", "strategy": "flowspec:width=many"}),
            "expected a whole number",
        ),
        (Intake("9-0", {"prompt": "x", "cancel": "1-0"}), "unknown job field 'cancel'"),
        (Intake("9-0", error="a field of the job is not UTF-8 text"), "not UTF-8"),
        (Intake("9-0", {}), "either 'prompt' or 'prompt_ids'"),
    ],
)
def test_what_cannot_be_served_is_answered_in_its_output(
    rig: Rig, intake: Intake, says: str
) -> None:
    control = rig.control()
    Scheduler(control, 2).admit(intake)
    error, reason = last(control, "9-0")
    assert says in error
    assert reason == "error"


def test_cancelling_nobodys_job_does_no_harm(rig: Rig) -> None:
    control = rig.control()
    Scheduler(control, 2).admit(Intake("9-0", {"cancel": "1-0"}))
    assert control.job("9-0") == {}
    assert control.revoke("1-0", "cancelled") is Code.DUP


def test_a_cancellation_that_meets_an_assignment_is_not_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    revoke = control.revoke
    calls = []

    def assigned_meanwhile(job: str, reason: str, error: str = "", **more: Any) -> Code:
        calls.append(job)
        if len(calls) == 1:
            scheduler.turn()
            return Code.STALE
        return revoke(job, reason, error, **more)

    monkeypatch.setattr(control, "revoke", assigned_meanwhile)
    scheduler.admit(Intake("9-0", {"cancel": job}))
    assert control.running() == []
    assert last(control, job) == ("", "cancelled")


def test_a_submission_nobody_can_look_at_is_refused_and_the_next_is_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    monkeypatch.setattr("flowspec.roles.scheduler.parse", lambda fields: 1 / 0)
    job = control.submit({"prompt": "p"})
    for intake in control.read_intake(1.0):
        scheduler.take(intake)
    assert last(control, job) == ("the job could not be read: ZeroDivisionError", "error")
    monkeypatch.undo()
    assert control.read_intake(0.01) == []


def test_a_scheduler_that_reads_no_submissions_stops(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    monkeypatch.setattr(control, "read_intake", lambda seconds: 1 / 0)
    with pytest.raises(BrokerError, match="reading submissions failed: ZeroDivisionError"):
        scheduler.run(lambda: False)


def test_a_job_from_before_everything_was_started_again_goes_on(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    before = control.holders(job)
    for role in ROLES:
        control.release(role, f"t-{role}")
    lease(control, *ROLES, token="new")
    again = Scheduler(control, 2)
    again.turn()
    assert control.running() == [job]
    after = control.holders(job)
    assert after == generations(control)
    assert all(after[role] > before[role] for role in ROLES)


def test_workers_of_another_setup_serve_nothing(rig: Rig) -> None:
    control = rig.control()
    lease(control, *ROLES)
    control.set_pipeline({"stages": "2", "target": "another"})
    scheduler = Scheduler(control, 2)
    submit(scheduler, control)
    scheduler.turn()
    assert control.running() == []


def test_a_later_job_has_a_patience_of_its_own(rig: Rig, clock: Clock) -> None:
    """Its wait begins when it comes, however long the pipeline has been without a worker."""
    control = rig.control()
    scheduler = Scheduler(control, 2, incomplete_seconds=0.4, clock=clock)
    first = submit(scheduler, control)
    scheduler.turn()
    clock.now += 0.25
    scheduler.turn()
    later = submit(scheduler, control)
    scheduler.turn()
    clock.now += 0.25
    scheduler.turn()
    assert control.queued() == [later]
    assert last(control, first)[1] == "error"
    clock.now += 0.25
    scheduler.turn()
    assert control.queued() == []


def test_a_job_does_not_pay_for_the_time_in_which_the_pipeline_was_complete(
    rig: Rig, clock: Clock
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=1, incomplete_seconds=0.2, clock=clock)
    lease(control, *ROLES)
    submit(scheduler, control)
    waits = submit(scheduler, control)
    scheduler.turn()
    clock.now += 0.25
    control.release("draft", "t-draft")
    scheduler.turn()
    assert control.queued() == [waits]


def test_a_pause_of_the_scheduler_ends_no_job(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the leases, is paused, and goes on with what it read."""
    control = rig.control()
    scheduler = Scheduler(control, 2, late_seconds=0.2, incomplete_seconds=0.2, clock=clock)
    lease(control, *ROLES)
    running = submit(scheduler, control)
    scheduler.turn()
    control.release("verify-2", "t-verify-2")
    scheduler.turn()
    stale = control.claims()
    lease(control, "verify-2")
    clock.now += 0.25
    with monkeypatch.context() as paused:
        paused.setattr(control, "claims", lambda: stale)
        scheduler.turn()
    assert control.running() == [running]
    assert last(control, running) == ("", "")
    scheduler.turn()
    assert control.running() == [running]


def test_the_time_of_a_pause_does_not_count(rig: Rig, clock: Clock) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, incomplete_seconds=10.0, clock=clock)
    job = submit(scheduler, control)
    scheduler.turn()
    clock.now += 3600.0
    scheduler.turn()
    assert control.queued() == [job]


def test_a_scheduler_that_was_replaced_decides_nothing(rig: Rig) -> None:
    control = rig.control()
    first = control.claim("scheduler", "first", {})
    old = Scheduler(control, 2, generation=first, late_seconds=0.0)
    lease(control, *ROLES)
    waiting = submit(old, control)
    control.release("scheduler", "first")
    new = Scheduler(control, 2, generation=control.claim("scheduler", "second", {}))
    old.turn()
    assert control.queued() == [waiting]
    new.turn()
    assert control.running() == [waiting]
    control.release("draft", "t-draft")
    old.turn()
    old.turn()
    assert control.running() == [waiting]


def test_a_run_names_the_workers_that_it_is_assigned_to(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    control.release("verify-1", "t-verify-1")
    lease(control, "verify-1", token="u")
    job = submit(scheduler, control)
    scheduler.turn()
    assert control.holders(job) == generations(control)


def two_jobs(rig: Rig, state: str) -> tuple[ControlAndClient, Scheduler, str, str]:
    """A scheduler with all workers, and two jobs, of which the first is ``state``."""
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    first, second = (submit(scheduler, control) for _ in range(2))
    if state == "running":
        scheduler.turn()
        assert control.running() == [first]
    return control, scheduler, first, second


def check_that_the_first_ends(
    control: ControlAndClient, scheduler: Scheduler, first: str, second: str
) -> None:
    """With a line about its record; the second one begins."""
    scheduler.turn()
    scheduler.turn()
    assert last(control, first) == (
        "the record of the job was deleted or damaged at the broker; submit the job again",
        "error",
    )
    assert (control.running(), control.queued()) == ([second], [])


@OVER_REDIS
@pytest.mark.parametrize("value", [None, "text"])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_job_whose_record_was_deleted_ends_and_the_next_one_begins(
    rig: Rig, client: redis.Redis, value: str | None, state: str
) -> None:
    """By an operator, or by a broker that evicts."""
    control, scheduler, first, second = two_jobs(rig, state)
    key = rig.keys.job(first)
    client.delete(key)
    if value is not None:
        client.set(key, value)
    check_that_the_first_ends(control, scheduler, first, second)


#: Bytes in the place of a value: no text, no number, no JSON.
DAMAGED = b"\x02y\xff\xfe["


@OVER_REDIS
@pytest.mark.parametrize(
    ("state", "name"),
    [*product(["queued", "running"], ["state", "epoch", "again"]), ("queued", "prompt_token_ids")],
)
def test_a_job_whose_record_is_damaged_ends_and_the_next_one_begins(
    rig: Rig, client: redis.Redis, name: str, state: str
) -> None:
    control, scheduler, first, second = two_jobs(rig, state)
    place = rig.keys.request if name == "prompt_token_ids" else rig.keys.job
    client.hset(place(first), name, DAMAGED)
    check_that_the_first_ends(control, scheduler, first, second)


@OVER_REDIS
@pytest.mark.parametrize("value", [None, "text"])
def test_a_job_whose_request_was_deleted_ends_and_the_next_one_begins(
    rig: Rig, client: redis.Redis, value: str | None
) -> None:
    control, scheduler, first, second = two_jobs(rig, "queued")
    client.delete(rig.keys.request(first))
    if value is not None:
        client.set(rig.keys.request(first), value)
    check_that_the_first_ends(control, scheduler, first, second)


@OVER_REDIS
def test_a_refused_job_stays_known_when_it_is_cancelled(rig: Rig) -> None:
    """It has no request."""
    control = rig.control()
    job = control.submit({"prompt": "p"})
    control.admit(job, {}, "no such strategy")
    before = control.job(job)
    assert control.revoke(job, "cancelled") is Code.DUP
    assert control.job(job) == before


@OVER_REDIS
def test_a_job_whose_holders_are_damaged_goes_on(rig: Rig, client: redis.Redis) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    client.hset(rig.keys.job(job), "holders", DAMAGED)
    scheduler.turn()
    assert control.running() == [job]
    assert control.holders(job) == generations(control)


@OVER_REDIS
def test_what_names_no_job_leaves_the_queue_and_the_running_jobs(
    rig: Rig, client: redis.Redis
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    for member in (DAMAGED, "x", "no such job"):
        client.lpush(rig.keys.queue, member)
        client.sadd(rig.keys.running, member)
    job = submit(scheduler, control)
    scheduler.turn()
    scheduler.turn()
    assert (control.running(), control.queued()) == ([job], [])
    assert client.lrange(rig.keys.queue, 0, -1) == []
    assert client.smembers(rig.keys.running) == {job.encode()}


@OVER_REDIS
@pytest.mark.parametrize(
    "name", ["stages", "middles", "drafts", "target", "target_values", "middle_values", "another"]
)
def test_a_record_that_was_damaged_is_written_again(
    rig: Rig, client: redis.Redis, name: str
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    record = control.pipeline()
    client.hset(rig.keys.record, name, DAMAGED)
    scheduler.turn()
    assert control.pipeline() == record
    job = submit(scheduler, control)
    scheduler.turn()
    assert control.running() == [job]


@OVER_REDIS
def test_a_job_whose_output_is_damaged_does_not_go_on(rig: Rig, client: redis.Redis) -> None:
    """Nobody knows what of its text is committed."""
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    first, second = (submit(scheduler, control) for _ in range(2))
    scheduler.turn()
    client.hset(rig.keys.request(first), "prompt_token_ids", "[1, 2]")
    client.xadd(rig.keys.out(first), {"kind": "tokens", "offset": 0, "ids": DAMAGED})
    control.release("verify-2", "t-verify-2")
    lease(control, "verify-2", token="new")
    scheduler.turn()
    scheduler.turn()
    error, reason = last(control, first)
    assert (error.partition(" has an entry")[0], reason) == (
        f"the output of job {first} at the broker",
        "error",
    )
    assert control.running() == [second]


@OVER_REDIS
def test_a_deleted_intake_is_joined_again(rig: Rig, client: redis.Redis) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    client.delete(JOBS)
    assert control.read_intake(0.01) == []
    assert submit(scheduler, control) in control.queued()


def test_no_name_of_any_length_becomes_a_key(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of jobs to cancel, and idempotency keys of jobs that are refused."""
    control = rig.control()
    scheduler = Scheduler(control, 2)
    asked: list[str] = []
    monkeypatch.setattr(control, "revoke", lambda job, reason: asked.append(job) or Code.DUP)
    job = submit(scheduler, control, cancel="9" * 65)
    assert asked == []
    assert not control.submitted(job), "it was taken in"
    submit(scheduler, control, cancel="9" * 64)
    assert asked == ["9" * 64]
    admitted: list[Any] = []
    admit = control.admit

    def noted(*given: Any, most: int | None) -> Code:
        admitted.append(given)
        return admit(*given, most=most)

    monkeypatch.setattr(control, "admit", noted)
    job = submit(scheduler, control, prompt="p", idempotency_key="k" * 2000)
    assert admitted == [(job, {}, "idempotency_key is longer than 1024 bytes: it has 2000")]
    assert last(control, job) == (admitted[0][2], "error")


def test_a_job_beyond_the_most_that_may_wait_is_refused_with_one_line(rig: Rig) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_waiting=2)
    first, second = submit(scheduler, control), submit(scheduler, control)
    third = submit(scheduler, control)
    assert control.queued() == [first, second]
    full = "the queue is full: 2 jobs wait already; submit again later"
    assert last(control, third) == (full, "error")
    assert control.revoke(first, "cancelled") is Code.OK
    fourth = submit(scheduler, control)
    assert control.queued() == [second, fourth]


@OVER_REDIS
@pytest.mark.parametrize("how", ["deleted", "replaced", "its group deleted"])
def test_an_intake_that_is_lost_while_it_is_read_is_made_anew(
    rig: Rig, client: redis.Redis, how: str
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    break_it = {
        "deleted": lambda: client.delete(JOBS),
        "replaced": lambda: client.delete(JOBS) and client.set(JOBS, "text"),
        "its group deleted": lambda: client.xgroup_destroy(JOBS, "flowspec"),
    }[how]
    control.submit({"prompt": "p"})
    for intake in control.read_intake(1.0):
        scheduler.admit(intake)
    timer = threading.Timer(0.2, break_it)
    timer.start()
    assert control.read_intake(1.0) == []
    timer.join()
    control.read_intake(0.01)
    assert submit(scheduler, control) in control.queued()


@OVER_REDIS
def test_an_entry_with_the_largest_id_does_not_end_submissions(
    rig: Rig, client: redis.Redis
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    before = submit(scheduler, control)
    last = "18446744073709551615-18446744073709551615"
    client.xadd(JOBS, {"prompt": "p"}, id=last)
    with pytest.raises(BrokerError, match="exhausted"):
        control.submit({"prompt": "p"})
    for intake in control.read_intake(0.01):
        scheduler.admit(intake)
    assert control.read_intake(0.01) == []
    after = submit(scheduler, control)
    assert control.queued() == [before, last, after]


@OVER_REDIS
def test_a_worker_that_came_after_the_generations_were_lost_is_another_one(
    rig: Rig, client: redis.Redis
) -> None:
    """It has nothing of the job, which waited for it for ever."""
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    before = control.holders(job)
    client.delete(rig.keys.generations)
    for role in ROLES:
        control.release(role, f"t-{role}")
    lease(control, *ROLES, token="new")
    scheduler.turn()
    assert control.running() == [job]
    after = control.holders(job)
    assert after == generations(control)
    assert all(after[role] > before[role] for role in ROLES)


def test_a_wrong_type_that_nobody_can_mend_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    refused = BrokerError("the broker refused a command: WRONGTYPE")
    refused.code = "WRONGTYPE"

    def refuse() -> None:
        raise refused

    monkeypatch.setattr(control, "claims", refuse)
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        scheduler.turn()


@OVER_REDIS
@pytest.mark.parametrize("name", ["queue", "running", "generations"])
def test_a_key_of_a_wrong_type_ends_no_turn(rig: Rig, client: redis.Redis, name: str) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2)
    lease(control, *ROLES)
    key = f"{rig.keys.tag}:{name}"
    client.delete(key)
    client.zadd(key, {"x": 1.0})
    scheduler.turn()
    lease(control, *ROLES)
    job = submit(scheduler, control)
    scheduler.turn()
    assert control.running() == [job]


@OVER_REDIS
@pytest.mark.parametrize("value", [None, "text"])
def test_a_record_that_was_deleted_is_written_again_and_running_jobs_go_on(
    rig: Rig, client: redis.Redis, value: str | None
) -> None:
    """By an operator, or by a broker that evicts."""
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=2, late_seconds=0.0)
    lease(control, *ROLES)
    first = submit(scheduler, control)
    scheduler.turn()
    record = control.pipeline()
    client.delete(rig.keys.record)
    if value is not None:
        client.set(rig.keys.record, value)
    scheduler.turn()
    assert control.pipeline() == record
    assert control.running() == [first]
    second = submit(scheduler, control)
    scheduler.turn()
    assert control.running() == sorted([first, second])


def test_a_scheduler_that_was_replaced_writes_no_record(rig: Rig) -> None:
    control = rig.control()
    old = Scheduler(control, 2, generation=control.claim("scheduler", "first", {}))
    control.release("scheduler", "first")
    control.claim("scheduler", "second", {})
    control.set_pipeline({})
    old.turn()
    assert control.pipeline() == {}


@OVER_REDIS
def test_a_broker_that_evicts_is_refused_at_first_and_noticed_later(
    rig: Rig,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("flowspec.roles.scheduler.EVICTION_LOOK_SECONDS", 0.0)
    scheduler = Scheduler(rig.control(), 2)
    scheduler.check_eviction()
    scheduler.turn()
    assert "broker evicts" not in capsys.readouterr().err
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match="maxmemory-policy is allkeys-lru, by which"):
            scheduler.check_eviction()
        scheduler.turn()
    finally:
        client.config_set("maxmemory-policy", "noeviction")
    assert "broker evicts" in capsys.readouterr().err


@OVER_REDIS
def test_a_scheduler_notices_that_the_broker_takes_no_writes_before_a_job_comes(
    rig: Rig, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "retrying", functools.partial(retrying, seconds=0.05))
    monkeypatch.setattr("flowspec.roles.scheduler.WRITES_LOOK_SECONDS", 0.0)
    scheduler = Scheduler(rig.control(), 2)
    stopped: list[bool] = []
    running = threading.Thread(target=scheduler.run, args=(lambda: bool(stopped),), daemon=True)
    running.start()
    before = str(client.config_get("maxmemory")["maxmemory"])
    until(lambda: client.exists(Keys().written))
    client.config_set("maxmemory", 1)
    try:
        assert "is out of memory" in until(lambda: scheduler.full)
    finally:
        client.config_set("maxmemory", before)
    until(lambda: not scheduler.full)
    stopped.append(True)
    running.join()


@OVER_REDIS
def test_a_scheduler_waits_for_a_broker_that_takes_no_writes(
    rig: Rig,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(redis_client, "retrying", functools.partial(retrying, seconds=0.05))
    control = rig.control()
    scheduler = Scheduler(control, 2)
    turns: list[bool] = []

    def turn() -> None:
        turns.append(True)
        if len(turns) == 1:
            raise BrokerFull("the broker is out of memory")

    monkeypatch.setattr(scheduler, "turn", turn)
    job = control.submit({"prompt": "p"})
    before = str(client.config_get("maxmemory")["maxmemory"])
    joined, full = threading.Event(), threading.Event()
    read = control.read_intake

    def read_once_full(seconds: float) -> list[Intake]:
        joined.set()
        full.wait()
        return read(seconds)

    monkeypatch.setattr(control, "read_intake", read_once_full)
    stopped: list[bool] = []
    running = threading.Thread(target=scheduler.run, args=(lambda: bool(stopped),), daemon=True)
    running.start()
    assert joined.wait(SECONDS)
    client.config_set("maxmemory", 1)
    full.set()
    said = ""

    def told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.count("broker takes no writes") >= 3 and len(turns) > 1

    try:
        until(told)
        assert control.job(job) == {}
        assert "is out of memory; raise maxmemory" in scheduler.full
    finally:
        client.config_set("maxmemory", before)
    assert until(lambda: control.job(job))["state"] == "queued"
    assert scheduler.full == ""
    stopped.append(True)
    running.join()


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_job_whose_client_vanished_ends_and_no_other(rig: Rig, clock: Clock, state: str) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=2, clock=clock)
    left, kept, free = jobs = [submit(scheduler, control) for _ in range(3)]
    if state == "running":
        lease(control, *ROLES)
    control.follow([left], -1)
    control.follow([kept], 3_600_000)
    scheduler.turn()
    assert sorted(control.running() + control.queued()) == sorted(jobs)
    for _ in range(12):
        assert last(control, left) == ("", ""), "clients get time to come back"
        clock.now += 0.75
        scheduler.turn()
    for _ in range(4):
        clock.now += 0.75
        scheduler.turn()
    said = "the client that waited for the job is gone; submit it again"
    assert last(control, left) == (said, "error")
    assert sorted(control.running() + control.queued()) == sorted([kept, free])
    assert control.unfollowed() == []


def test_a_client_that_comes_back_keeps_its_job(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of the broker all clients are late."""
    control = rig.control()
    scheduler = Scheduler(control, 2, clock=clock)
    job = submit(scheduler, control)
    for unfollowed in ([job], [], [job], [], [job]):
        monkeypatch.setattr(control, "unfollowed", lambda found=unfollowed: found)
        for _ in range(8):
            clock.now += 0.75
            scheduler.turn()
        assert control.queued() == [job]


@OVER_REDIS
def test_what_is_known_of_clients_goes_with_their_jobs(
    rig: Rig, client: redis.Redis, clock: Clock
) -> None:
    control = rig.control()
    scheduler = Scheduler(control, 2, clock=clock)
    ended, waits = (submit(scheduler, control) for _ in range(2))
    seconds, _ = client.time()
    followed = rig.keys.followed
    client.zadd(followed, {"1-1": (seconds - 7200) * 1000, "2-2": (seconds - 60) * 1000})
    control.follow([ended, waits], -1)
    assert control.revoke(ended, "cancelled") is Code.OK
    assert control.unfollowed() == [waits]
    assert set(client.zrange(followed, 0, -1)) == {b"2-2", waits.encode()}


def _replace(client: redis.Redis, key: str) -> None:
    with client.pipeline() as changes:
        changes.delete(key)
        changes.zadd(key, {"x": 1.0})
        changes.execute()


@OVER_REDIS
@pytest.mark.parametrize("lose", [redis.Redis.delete, _replace])
@pytest.mark.parametrize("seen", [True, False])
def test_jobs_that_lose_their_place_get_it_back(
    rig: Rig, client: redis.Redis, lose: Callable[[redis.Redis, str], object], seen: bool
) -> None:
    """Without it they would neither begin nor end, and their keys would stay for ever."""
    control = rig.control()
    scheduler = Scheduler(control, 2, most_running=1)
    lease(control, *ROLES)
    runs = submit(scheduler, control)
    scheduler.turn()
    waits = [submit(scheduler, control) for _ in range(2)]
    if seen:
        scheduler.turn()
    lose(client, rig.keys.queue)
    lose(client, rig.keys.running)
    for _ in range(2):
        scheduler.turn()
    assert control.running() == [runs]
    assert control.queued() == waits
    assert control.revoke(runs, "cancelled") is Code.OK
    for _ in range(2):
        scheduler.turn()
    assert control.running() == waits[:1]
