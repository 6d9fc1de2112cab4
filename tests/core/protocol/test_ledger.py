"""The ledger: every answer of every change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import DRAFT, GRAPH, SCHEDULER
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.ledger import Admission, Change, Delivery, JobEntry, JobState, Ledger
from flowspec.core.protocol.machine import Complete, OpenJob, Send
from flowspec.core.protocol.messages import Envelope, Revoke, Submit, Synced
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1, S2
from tests.core.protocol.ledgers import (
    CONTEXT,
    FIELDS,
    FIRST,
    JOB,
    MANY,
    SECOND,
    WORKERS,
    accepted,
    commit,
    held,
    picture,
    put_back,
    queued,
    running,
    send,
)

# ---- jobs ----------------------------------------------------------------------------------------


def test_an_admitted_job_waits_with_its_fields() -> None:
    ledger = Ledger()
    assert ledger.admit(JOB, FIELDS, 1) == Admission(Code.OK)
    entry = ledger.jobs[JOB]
    assert (entry.state, dict(entry.fields), entry.epoch) == (JobState.QUEUED, FIELDS, 0)
    assert (entry.offset, entry.emitted) == (None, 0)
    assert ledger.queue == [JOB]


def test_a_job_is_admitted_once() -> None:
    ledger = queued()
    before = picture(ledger)
    assert ledger.admit(JOB, {"prompt": "other"}, 0, "a reason") == Admission(Code.DUP)
    assert picture(ledger) == before


def ended_at_once(ledger: Ledger, job: str, before: object) -> None:
    """Assert that nothing changed except that ``job`` has ended, and kept none of its fields."""
    assert picture(ledger.jobs.pop(job)) == picture(JobEntry((), JobState.DONE))
    assert picture(ledger) == before


def test_a_job_beyond_what_the_queue_holds_is_ended() -> None:
    ledger = queued()
    before = picture(ledger)
    admission = ledger.admit("2-0", FIELDS, 1)
    assert (admission.code, admission.duplicate_of) == (Code.FULL, "")
    assert admission.refused == "the queue is full: 1 jobs wait already; submit again later"
    ended_at_once(ledger, "2-0", before)


def test_a_job_with_the_key_of_another_is_ended() -> None:
    ledger = Ledger()
    ledger.admit(JOB, {**FIELDS, "idempotency_key": "mine"}, MANY)
    before = picture(ledger)
    admission = ledger.admit("2-0", {**FIELDS, "idempotency_key": "mine"}, 0)
    assert (admission.code, admission.duplicate_of) == (Code.DUP, JOB)
    assert admission.refused == f"the idempotency key belongs to job {JOB}"
    ended_at_once(ledger, "2-0", before)
    assert ledger.admit("3-0", {**FIELDS, "idempotency_key": "other"}, MANY).code is Code.OK


def test_a_job_with_the_key_of_another_and_other_fields_is_refused() -> None:
    ledger = Ledger()
    ledger.admit(JOB, {**FIELDS, "idempotency_key": "mine"}, MANY)
    before = picture(ledger)
    admission = ledger.admit("2-0", {**FIELDS, "seed": "9", "idempotency_key": "mine"}, MANY)
    why = f"the idempotency key belongs to job {JOB} with other fields; use another key"
    assert admission == Admission(Code.DUP, why)
    ended_at_once(ledger, "2-0", before)


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("how", ["finish", "revoke", "revoke a complete one"])
def test_a_job_that_has_failed_loses_its_key(failed: bool, how: str) -> None:
    ledger = Ledger()
    fields = {**FIELDS, "idempotency_key": "mine"}
    ledger.admit(JOB, fields, MANY)
    ledger.assign(JOB, MANY)
    if how == "finish":
        ledger.finish(FIRST, failed=failed)
    else:
        ledger.jobs[JOB].text_end = "eos" if how == "revoke a complete one" else ""
        again = int(how == "revoke a complete one")
        ledger.revoke(JOB, WORKERS, again=again, failed=failed)
    admission = ledger.admit("2-0", fields, MANY)
    if failed and how != "revoke a complete one":
        assert admission == Admission(Code.OK)
        assert ledger.admit("3-0", fields, MANY).duplicate_of == "2-0"
    else:
        assert admission.duplicate_of == JOB


def test_a_refused_job_is_ended_and_takes_no_key_and_no_place() -> None:
    ledger = queued()
    before = picture(ledger)
    admission = ledger.admit("2-0", {**FIELDS, "idempotency_key": "mine"}, 0, "no prompt")
    assert admission == Admission(Code.OK, "no prompt")
    ended_at_once(ledger, "2-0", before)
    again = ledger.admit("3-0", {**FIELDS, "idempotency_key": "mine"}, MANY)
    assert again == Admission(Code.OK)


def test_an_empty_key_is_none() -> None:
    ledger = Ledger()
    for job in ("1-0", "2-0"):
        assert ledger.admit(job, {**FIELDS, "idempotency_key": ""}, MANY) == Admission(Code.OK)


def test_a_waiting_job_is_assigned_as_a_new_run() -> None:
    ledger = queued()
    change = ledger.assign(JOB, 1, 2.5)
    submit = Submit(FIRST, tuple(FIELDS.items()), 2.5)
    assert change == Change(Code.OK, (Delivery(DRAFT, Envelope(SCHEDULER, 1, submit)),))
    entry = ledger.jobs[JOB]
    assert (entry.state, entry.epoch, ledger.queue) == (JobState.RUNNING, 1, [])
    assert ledger.running == {JOB}


@pytest.mark.parametrize(
    ("job", "most_running", "code"),
    [("9-0", MANY, Code.GAP), (JOB, 0, Code.FULL)],
)
def test_neither_an_unknown_job_nor_one_too_many_is_assigned(
    job: str, most_running: int, code: Code
) -> None:
    ledger = queued()
    ledger.admit("2-0", FIELDS, MANY)
    before = picture(ledger)
    assert ledger.assign(job, most_running) == Change(code)
    assert picture(ledger) == before


def test_a_job_that_runs_is_not_assigned_again() -> None:
    ledger = running()
    before = picture(ledger)
    assert ledger.assign(JOB, MANY) == Change(Code.GAP)
    assert picture(ledger) == before


def test_an_owner_ends_its_run_once() -> None:
    ledger = running()
    assert ledger.finish(FIRST) is Code.OK
    assert (ledger.jobs[JOB].state, ledger.running) == (JobState.DONE, set())
    before = picture(ledger)
    assert ledger.finish(FIRST) is Code.STALE
    assert picture(ledger) == before


def test_a_running_job_is_revoked_and_its_workers_told() -> None:
    ledger = running()
    change = ledger.revoke(JOB, WORKERS)
    envelope = Envelope(SCHEDULER, 0, Revoke(SECOND))
    assert change == Change(Code.OK, tuple(Delivery(to, envelope) for to in WORKERS))
    entry = ledger.jobs[JOB]
    assert (entry.state, entry.epoch, ledger.running) == (JobState.DONE, 2, set())


def test_a_waiting_job_is_revoked_and_nothing_is_sent() -> None:
    ledger = queued()
    ledger.admit("2-0", FIELDS, MANY)
    assert ledger.revoke(JOB, WORKERS) == Change(Code.OK)
    assert (ledger.jobs[JOB].state, ledger.queue) == (JobState.DONE, ["2-0"])


@pytest.mark.parametrize("job", [JOB, "9-0"])
def test_a_job_that_has_ended_or_is_unknown_is_not_revoked(job: str) -> None:
    ledger = running()
    ledger.finish(FIRST)
    before = picture(ledger)
    assert ledger.revoke(job, WORKERS) == Change(Code.DUP)
    assert picture(ledger) == before


# ---- runs ----------------------------------------------------------------------------------------


def test_a_job_is_opened_once() -> None:
    ledger = queued()
    ledger.assign(JOB, MANY)
    assert ledger.open(accepted(FIRST)) is Code.OK
    assert ledger.jobs[JOB].offset == CONTEXT
    before = picture(ledger)
    assert ledger.open(OpenJob(FIRST, (1,), "other")) is Code.DUP
    assert picture(ledger) == before


def test_messages_are_delivered_in_the_order_of_their_numbers() -> None:
    ledger = running()
    one = send(FIRST, 1)
    stamp = Stamp(3.0, D0)
    assert ledger.publish(one, stamp) == Change(Code.OK, (Delivery(S1, one.envelope, stamp),))
    before = picture(ledger)
    assert ledger.publish(one) == Change(Code.DUP)
    assert picture(ledger) == before
    assert ledger.publish(send(FIRST, 3)).code is Code.OK, "the second may have gone straight"
    assert ledger.publish(send(FIRST, 2)).code is Code.DUP
    assert ledger.publish(send(FIRST, 1)).code is Code.DUP
    assert ledger.publish(send(FIRST, 1, to=S2)).code is Code.OK, "receivers are counted apart"
    assert ledger.publish(send(FIRST, 1, sender=S2)).code is Code.OK, "so are senders"


def test_a_message_sent_twice_still_completes_its_tasks() -> None:
    ledger = running()
    ledger.publish(send(FIRST, 1))
    ledger.publish(held(FIRST, "t", "a"))
    change = ledger.publish(send(FIRST, 1, completes=["a"]))
    assert change.code is Code.DUP
    assert [delivery.task for delivery in change.deliveries] == ["t"]


def test_a_task_is_held_until_what_it_waits_for_is_complete() -> None:
    ledger = running()
    assert ledger.publish(held(FIRST, "t", "a", "b"), Stamp(1.0, D0)) == Change(Code.OK)
    assert ledger.complete(Complete(FIRST, ("a",)), Stamp(5.0, S1)) == Change(Code.OK)
    change = ledger.publish(send(FIRST, 1, sender=S1, to=S2, completes=["b"]), Stamp(3.0, S2))
    own, freed = change.deliveries
    assert own.to == S2
    envelope = Envelope(GRAPH, 1, Synced(FIRST, "t"))
    assert freed == Delivery(S1, envelope, Stamp(5.0, S1), task="t")


def test_a_task_sent_twice_is_not_held_twice_and_completes_its_tasks() -> None:
    ledger = running()
    ledger.publish(held(FIRST, "t", "a"))
    change = ledger.publish(held(FIRST, "t", "other", completes=["a"]))
    assert (change.code, [one.task for one in change.deliveries]) == (Code.DUP, ["t"])
    assert ledger.publish(held(FIRST, "t", completes=["a"])) == Change(Code.DUP)


def test_what_the_graph_lets_go_is_numbered_per_receiver() -> None:
    ledger = running()
    released = [
        *ledger.publish(held(FIRST, "t1")).deliveries,
        *ledger.publish(held(FIRST, "t2", to=S2)).deliveries,
        *ledger.publish(held(FIRST, "t3")).deliveries,
    ]
    numbers = [(one.to, one.envelope.seq) for one in released]
    assert numbers == [(S1, 1), (S2, 1), (S1, 2)]
    assert all(one.envelope.sender == GRAPH for one in released)
    assert ledger.publish(send(FIRST, 1)).code is Code.OK, "apart from the draft worker's own"


@pytest.mark.parametrize("message", [send(FIRST, 2, completes=["a"]), held(FIRST, "t2")])
def test_a_log_at_its_cap_takes_nothing(message: Send) -> None:
    ledger = running(cap=1)
    ledger.publish(held(FIRST, "t", "a", to=S2))
    ledger.publish(send(FIRST, 1))
    before = picture(ledger)
    assert ledger.publish(message) == Change(Code.FULL)
    assert picture(ledger) == before
    ledger.trim(S1, {FIRST: 1, SECOND: 9})
    assert ledger.publish(message).code is Code.OK


def test_a_commit_advances_the_run_and_prunes_every_stage() -> None:
    ledger = running()
    ledger.publish(send(FIRST, 1, to=S2))
    ledger.publish(held(FIRST, "t", "a"))
    step = commit(FIRST, CONTEXT, 1, 2, emitted=4, advance=3, tokens=(7, 8), completes=["a"])
    stamp = Stamp(1.0, D0)
    change = ledger.commit(step, stamp)
    assert change.code is Code.OK
    assert change.deliveries[:2] == (
        Delivery(S1, step.prunes[0], stamp),
        Delivery(S2, step.prunes[1], stamp),
    )
    assert [one.task for one in change.deliveries[2:]] == ["t"]
    entry = ledger.jobs[JOB]
    assert (entry.offset, entry.emitted, entry.entries) == (CONTEXT + 3, 4 + 2, 1)
    assert ledger.publish(send(FIRST, 1)).code is Code.DUP, "a prune counts as a message"


@pytest.mark.parametrize(
    ("offset", "seqs", "code"),
    [
        (CONTEXT - 1, (1, 1), Code.DUP),
        (CONTEXT + 1, (1, 1), Code.GAP),
        (CONTEXT, (0, 1), Code.GAP),
        (CONTEXT, (1, 0), Code.GAP),
    ],
)
def test_a_commit_at_another_place_changes_nothing(
    offset: int, seqs: tuple[int, ...], code: Code
) -> None:
    ledger = running()
    ledger.publish(held(FIRST, "t", "a"))
    before = picture(ledger)
    assert ledger.commit(commit(FIRST, offset, *seqs, completes=["a"])) == Change(code)
    assert picture(ledger) == before


def test_before_a_job_is_open_nothing_is_committed() -> None:
    ledger = queued()
    ledger.assign(JOB, MANY)
    before = picture(ledger)
    assert ledger.commit(commit(FIRST, 0)) == Change(Code.GAP)
    assert picture(ledger) == before


@pytest.mark.parametrize("full", ["the first log", "the last log", "the output"])
def test_a_commit_without_room_for_all_of_it_changes_nothing(full: str) -> None:
    ledger = running(cap=2)
    seqs = [1, 1]
    if full == "the output":
        for at in range(2):
            ledger.commit(commit(FIRST, CONTEXT + at))
    else:
        to = S1 if full == "the first log" else S2
        seqs[to == S2] = 3
        for seq in (1, 2):
            ledger.publish(send(FIRST, seq, to=to))
    offset = ledger.jobs[JOB].offset
    assert offset is not None
    before = picture(ledger)
    assert ledger.commit(commit(FIRST, offset, *seqs)) == Change(Code.FULL)
    assert picture(ledger) == before


CHANGES: dict[str, Callable[[Ledger, RunKey], Code]] = {
    "open": lambda ledger, run: ledger.open(accepted(run)),
    "publish": lambda ledger, run: ledger.publish(send(run, 1, completes=["a"])).code,
    "publish a task": lambda ledger, run: ledger.publish(held(run, "t2", completes=["a"])).code,
    "complete": lambda ledger, run: ledger.complete(Complete(run, ("a",))).code,
    "commit": lambda ledger, run: ledger.commit(commit(run, CONTEXT, 1, 1)).code,
    "finish": lambda ledger, run: ledger.finish(run),
}


def test_what_the_owner_may_do_is_taken() -> None:
    for name, change in CHANGES.items():
        ledger = queued() if name == "open" else running()
        if name == "open":
            ledger.assign(JOB, MANY)
        ledger.publish(held(FIRST, "t", "a"))
        assert change(ledger, FIRST) is Code.OK, name


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("state", ["queued", "running", "finished", "revoked", "put back"])
def test_whoever_does_not_own_the_job_changes_nothing(state: str, name: str) -> None:
    ledger = queued() if state == "queued" else running()
    if state != "queued":
        ledger.publish(held(FIRST, "t", "a"))
    if state == "finished":
        ledger.finish(FIRST)
    elif state == "revoked":
        ledger.revoke(JOB, WORKERS)
    elif state == "put back":
        put_back(ledger)
    before = picture(ledger)
    owners = {1} if state == "running" else set()
    for epoch in {0, 1, 2, 3} - owners:
        assert CHANGES[name](ledger, RunKey(JOB, epoch)) is Code.STALE
    assert CHANGES[name](ledger, RunKey("9-0", 1)) is Code.STALE, "no such job"
    assert picture(ledger) == before


# ---- a second run --------------------------------------------------------------------------------


def second_run() -> Ledger:
    """A job's second run, just assigned; its first run left state behind."""
    ledger = running()
    for seq in (1, 2, 3):
        ledger.publish(send(FIRST, seq))
    ledger.publish(held(FIRST, "t", "a"))
    ledger.publish(held(FIRST, "done"))
    ledger.commit(commit(FIRST, CONTEXT, 4, 1))
    put_back(ledger)
    assert ledger.assign(JOB, MANY).code is Code.OK
    return ledger


def test_a_second_run_counts_and_waits_anew_and_goes_on_with_the_text() -> None:
    ledger = second_run()
    entry = ledger.jobs[JOB]
    assert (entry.epoch, entry.state) == (2, JobState.RUNNING)
    assert (entry.offset, entry.emitted, entry.entries) == (CONTEXT + 1, 1, 1)
    assert entry.graph.waiting == ()
    assert not entry.graph.knows("t")
    assert ledger.complete(Complete(SECOND, ("a",))) == Change(Code.OK), "the first run's task"
    assert ledger.publish(send(SECOND, 1)).code is Code.OK
    (released,) = ledger.publish(held(SECOND, "done")).deliveries
    assert released.envelope == Envelope(GRAPH, 1, Synced(SECOND, "done"))
    assert ledger.open(accepted(SECOND)) is Code.DUP, "its context is known"
    step = commit(SECOND, CONTEXT + 1, 2, 1, emitted=1)
    assert ledger.commit(step).code is Code.OK
    assert (entry.offset, entry.emitted) == (CONTEXT + 2, 2)


#: Operations of a second run's owner, in order.
OWN: list[Callable[[Ledger], object]] = [
    lambda ledger: ledger.open(accepted(SECOND)),
    lambda ledger: ledger.publish(send(SECOND, 1)),
    lambda ledger: ledger.publish(held(SECOND, "t", "a", "b")),
    lambda ledger: ledger.publish(send(SECOND, 2, completes=["a"])),
    lambda ledger: ledger.commit(commit(SECOND, CONTEXT + 1, 3, 1, emitted=1, completes=["b"])),
    lambda ledger: ledger.publish(held(SECOND, "done")),
    lambda ledger: ledger.complete(Complete(SECOND, ("done",))),
    lambda ledger: ledger.commit(commit(SECOND, CONTEXT + 2, 4, 2, emitted=2)),
    lambda ledger: ledger.finish(SECOND),
]
#: Late writes of the first run's owner, as a code.
LATE: list[Callable[[Ledger], Code]] = [
    lambda ledger: ledger.open(accepted(FIRST)),
    lambda ledger: ledger.publish(send(FIRST, 1)).code,
    lambda ledger: ledger.publish(send(FIRST, 4)).code,
    lambda ledger: ledger.publish(send(FIRST, 5, completes=["a", "b"])).code,
    lambda ledger: ledger.publish(held(FIRST, "t", "x", completes=["a"])).code,
    lambda ledger: ledger.publish(held(FIRST, "late")).code,
    lambda ledger: ledger.complete(Complete(FIRST, ("a", "b"))).code,
    lambda ledger: ledger.commit(commit(FIRST, CONTEXT, 4, 1)).code,
    lambda ledger: ledger.commit(commit(FIRST, CONTEXT + 1, 5, 2, completes=["a"])).code,
    lambda ledger: ledger.finish(FIRST),
]


@given(st.permutations(range(len(LATE))), st.data())
def test_nothing_late_of_the_first_run_touches_the_second(
    order: list[int], data: st.DataObject
) -> None:
    alone = second_run()
    expected = [own(alone) for own in OWN]
    disturbed = second_run()
    moments = sorted(data.draw(st.integers(0, len(OWN)), label="moment") for _ in order)
    answers = []
    for moment in range(len(OWN) + 1):
        while moments and moments[0] == moment:
            moments.pop(0)
            before = picture(disturbed)
            assert LATE[order.pop(0)](disturbed) is Code.STALE
            assert picture(disturbed) == before
        if moment < len(OWN):
            answers.append(OWN[moment](disturbed))
    assert not order
    assert answers == expected
    assert picture(disturbed) == picture(alone)


# ---- holders -------------------------------------------------------------------------------------


def held_by(**tokens: str) -> tuple[Ledger, dict[str, int]]:
    """A ledger with a waiting job, and the generations of roles claimed by ``tokens``."""
    ledger = queued()
    return ledger, {role: ledger.claim(role, token) for role, token in tokens.items()}


def test_only_the_holders_of_a_run_change_it() -> None:
    ledger, holders = held_by(draft="a", verify="b")
    assert ledger.claim("draft", "a") == 1
    holders["draft"] = ledger.claim("draft", "c")
    assert holders == {"draft": 2, "verify": 1}
    assert ledger.assign(JOB, MANY, holders=holders).code is Code.OK
    before = picture(ledger)
    for other in (Holder("draft", 1), Holder("draft", 3), Holder("verify", 2), Holder("x", 1)):
        assert ledger.open(accepted(FIRST), other) is Code.STALE
        assert ledger.publish(send(FIRST, 1), by=other) == Change(Code.STALE)
        assert ledger.complete(Complete(FIRST, ("t",)), by=other) == Change(Code.STALE)
        assert ledger.commit(commit(FIRST, CONTEXT, 1, 1), by=other) == Change(Code.STALE)
        assert ledger.finish(FIRST, other) is Code.STALE
    assert picture(ledger) == before
    assert ledger.open(accepted(FIRST), Holder("draft", 2)) is Code.OK
    assert ledger.publish(send(FIRST, 1), by=Holder("verify", 1)).code is Code.OK


def test_a_job_is_assigned_to_the_latest_holders_by_the_latest_scheduler() -> None:
    ledger, holders = held_by(draft="a", scheduler="s")
    scheduler = Holder("scheduler", holders.pop("scheduler"))
    ledger.claim("draft", "b")
    assert ledger.assign(JOB, MANY, holders=holders, by=scheduler) == Change(Code.STALE)
    holders["draft"] = 2
    ledger.claim("scheduler", "t")
    assert ledger.assign(JOB, MANY, holders=holders, by=scheduler) == Change(Code.STALE)
    assert ledger.queue == [JOB]


def test_a_job_is_put_back_until_it_has_lost_too_many_workers() -> None:
    ledger, holders = held_by(draft="a")
    ledger.admit("2-0", FIELDS, MANY)
    lost = Holder("draft", 1)
    for again in range(3):
        assert ledger.assign(JOB, MANY, holders=holders).code is Code.OK
        assert ledger.revoke(JOB, WORKERS, lost=lost, leased=True, again=2) == Change(Code.STALE)
        assert ledger.revoke(JOB, WORKERS, lost=lost, again=2).code is Code.OK
        assert ledger.queue == ([JOB, "2-0"] if again < 2 else ["2-0"])
        assert ledger.running == set()
    assert ledger.jobs[JOB].state is JobState.DONE


def test_a_worker_that_leaves_is_no_loss_and_a_complete_text_ends_the_job() -> None:
    ledger, holders = held_by(draft="a")
    ledger.leave("draft", "b")
    ledger.leave("draft", "a")
    for _ in range(5):
        ledger.assign(JOB, MANY, holders=holders)
        ledger.revoke(JOB, WORKERS, lost=Holder("draft", 1), again=2)
        assert ledger.queue == [JOB]
    ledger.assign(JOB, MANY, holders=holders)
    run = RunKey(JOB, ledger.jobs[JOB].epoch)
    ledger.open(accepted(run))
    ledger.commit(dataclasses.replace(commit(run, CONTEXT, 1, 1), finish="eos"))
    ledger.revoke(JOB, WORKERS, lost=Holder("draft", 1), again=2)
    assert ledger.queue == []
    assert ledger.jobs[JOB].state is JobState.DONE
