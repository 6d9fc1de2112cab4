"""A run is assigned to the holders of the pipeline's roles; over every broker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.machine import Complete, Finish, OpenJob
from flowspec.core.protocol.messages import Earlier, Revoke, Segment, Submit
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1
from tests.clients import ControlAndClient
from tests.transport.conftest import Rig, bundle, commit, send

ROLES = ("draft", "verify-1", "verify-2")


def claim(control: ControlAndClient, token: str, *roles: str) -> dict[str, int]:
    return {role: control.claim(role, f"{token}-{role}", {}) for role in roles}


def waiting(control: ControlAndClient) -> str:
    job = control.submit({"prompt": "p"})
    for intake in control.read_intake(1.0):
        control.admit(intake.job, intake.fields)
        control.acknowledge([intake.job])
    return job


def test_every_other_token_raises_the_generation_of_its_role_alone(rig: Rig) -> None:
    control = rig.control()
    first = claim(control, "a", *ROLES)
    assert all(first.values())
    control.release("verify-2", "a-verify-2")
    assert claim(control, "a", "verify-2")["verify-2"] == first["verify-2"], "nobody came between"
    control.release("verify-2", "a-verify-2")
    second = control.claim("verify-2", "b", {})
    assert second > first["verify-2"]
    assert control.claim("verify-2", "a-verify-2", {}) == 0
    assert control.claim("verify-2", "b", {}) == second
    control.release("verify-2", "b")
    third = control.claim("verify-2", "a-verify-2", {})
    assert third > second
    found = {role: claim.generation for role, claim in control.claims().items()}
    assert found == {**first, "verify-2": third}


def test_a_job_is_assigned_to_the_latest_holders_only(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    old = claim(control, "a", *ROLES)
    control.release("verify-1", "a-verify-1")
    new = old | claim(control, "b", "verify-1")
    job = waiting(control)
    assert control.assign(job, 1, old) is Code.STALE
    assert control.queued() == [job]
    assert control.assign(job, 1, new) is Code.OK
    assert control.holders(job) == new == {**old, "verify-1": new["verify-1"]}
    assert new["verify-1"] > old["verify-1"]
    (submit,) = (envelope.message for envelope in draft.read(1.0).envelopes)
    assert isinstance(submit, Submit)
    assert replace(submit, queued_seconds=0.0) == Submit(
        RunKey(job, 1), (("prompt", "p"),), 0.0, tuple(new[role] for role in ROLES)
    )


def test_a_scheduler_that_was_replaced_decides_nothing(rig: Rig) -> None:
    control = rig.control()
    (old,) = claim(control, "a", "scheduler").values()
    control.release("scheduler", "a-scheduler")
    (new,) = claim(control, "b", "scheduler").values()
    job = waiting(control)
    assert control.assign(job, 1, {}, old) is Code.STALE
    assert control.assign(job, 1, {}, new) is Code.OK
    assert control.revoke(job, "error", "lost", by=old) is Code.STALE
    assert control.running() == [job]
    assert control.revoke(job, "error", "lost", by=new) is Code.OK


def test_a_worker_whose_lease_is_in_force_is_not_lost(rig: Rig) -> None:
    control = rig.control()
    held = claim(control, "a", *ROLES)
    job = waiting(control)
    control.assign(job, 1, held)
    mine = Holder("verify-2", held["verify-2"])
    assert control.revoke(job, "error", "lost", lost=mine) is Code.STALE
    assert control.running() == [job]
    control.release("verify-2", "a-verify-2")
    claim(control, "b", "verify-2")
    assert control.revoke(job, "error", "lost", lost=mine) is Code.OK, "another has the role"


@pytest.mark.parametrize("generation", [1, 2])
def test_only_the_holders_of_a_run_are_heard(rig: Rig, generation: int) -> None:
    """A worker that was paused, and whose role another one has taken, writes for nobody."""
    control = rig.control()
    held = claim(control, "a", *ROLES)
    control.release("draft", "a-draft")
    held |= claim(control, "b", "draft")
    draft = rig.link(D0, Holder("draft", generation))
    stage = rig.link(S1)
    job = waiting(control)
    assert control.assign(job, 1, held) is Code.OK
    run = RunKey(job, 1)
    segment = Segment(run, 0, 0, (7,), (6,), (7,))
    ops = [
        OpenJob(run, (5, 6), "flowspec"),
        send(S1, job, 1),
        bundle(S1, segment, seq=2),
        commit(job, seq=3),
        Complete(run, ("t",)),
        Finish(run, "length", "", {}),
    ]
    heard = generation == held["draft"]
    assert draft.write(ops) == [Code.OK if heard else Code.STALE] * len(ops)
    assert len(stage.read(0.2).envelopes) == (3 if heard else 0)
    assert control.running() == ([] if heard else [job])


def test_a_job_that_goes_on_takes_along_what_it_has_committed(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([commit(job, seq=1), commit(job, 2, seq=2)])
    assert control.revoke(job, "error", "lost", again=2) is Code.OK
    assert control.queued() == [job]
    assert control.running() == []
    assert draft.write([commit(job, 3, seq=3)]) == [Code.STALE]
    assert control.assign(job, 1, {}) is Code.OK
    *_, revoke, submit = (envelope.message for envelope in draft.read(1.0).envelopes)
    assert revoke == Revoke(RunKey(job, 2))
    assert isinstance(submit, Submit)
    assert submit.run == RunKey(job, 3)
    assert submit.earlier is not None
    earlier = replace(submit.earlier, first_token_seconds=0.0)
    assert earlier == Earlier((5, 6), ((41,), (42,)))
    assert 0 <= submit.earlier.first_token_seconds < 60
    assert draft.write([OpenJob(RunKey(job, 3), (5, 6), "flowspec")]) == [Code.DUP]
    assert draft.write([commit(job, 3, seq=1, epoch=3)]) == [Code.OK]
    tokens = [entry.fields["ids"] for entry in control.read_output(job, "0", 0.1)]
    assert tokens == ["[41]", "[42]", "[43]"]


def test_a_job_that_was_never_opened_begins_from_its_fields(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = waiting(control)
    control.assign(job, 1, {})
    control.revoke(job, "error", "lost", again=2)
    control.assign(job, 1, {})
    *_, submit = (envelope.message for envelope in draft.read(1.0).envelopes)
    assert isinstance(submit, Submit)
    assert (submit.earlier, submit.fields) == (None, (("prompt", "p"),))


def test_a_job_whose_text_is_complete_ends_with_it(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([commit(job, seq=1, finish="eos")])
    assert control.revoke(job, "error", "lost", again=2) is Code.OK
    assert control.queued() == []
    tokens, end = (entry.fields for entry in control.read_output(job, "0", 0.1))
    assert (tokens["kind"], end["kind"], end["finish_reason"]) == ("tokens", "end", "eos")


def test_a_job_is_put_back_only_so_often(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    for _ in range(2):
        assert control.revoke(job, "error", "lost", again=2) is Code.OK
        assert control.queued() == [job]
        control.assign(job, 1, {})
    assert control.revoke(job, "error", "lost", again=2) is Code.OK
    assert control.queued() == []
    kinds = [entry.fields["kind"] for entry in control.read_output(job, "0", 0.1)]
    assert kinds == ["error", "end"]
