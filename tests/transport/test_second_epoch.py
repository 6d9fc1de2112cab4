"""A job's second run keeps nothing of its first but the output; over both brokers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from flowspec.core.protocol.addresses import GRAPH
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Complete, Finish, OpenJob
from flowspec.core.protocol.messages import Close, Envelope, Prune, Revoke, Submit, Synced
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError
from flowspec.transport.base import Link, Op, OutputEntry, PutRows, Record
from tests.addresses import D0, S1, S2
from tests.clients import ControlAndClient
from tests.transport.conftest import Rig, commit, send

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclass
class Pipeline:
    """The links of a pipeline, and one of its jobs."""

    rig: Rig
    control: ControlAndClient
    draft: Link
    first: Link
    second: Link
    job: str

    def read_all(self) -> dict[str, tuple[Envelope, ...]]:
        """Everything delivered to every worker since the last call."""
        links = (self.draft, self.first, self.second)
        return {str(link.address): link.read(0.0).envelopes for link in links}

    def facts(self) -> tuple[object, ...]:
        """The broker's state of the job and the pipeline."""
        control = self.control
        job = self.job
        output = self.output()
        return control.job(job), control.holders(job), output, control.queued(), control.running()

    def output(self) -> list[OutputEntry]:
        return self.control.read_output(self.job, "0", 0.01)

    def second_run(self) -> RunKey:
        """End the first run without cleanup and begin the second one."""
        self.rig.requeue(self.job)
        assert self.control.queued() == [self.job]
        assert self.control.running() == []
        assert self.control.assign(self.job, 1, {}) is Code.OK
        return RunKey(self.job, 2)


def held(job: str, task: str, *after: str, epoch: int) -> Op:
    """A task of a run for the second stage that depends on others."""
    message = Synced(RunKey(job, epoch), task)
    return send(S2, job, 0, message, sender=GRAPH, task=task, after=after)


@pytest.fixture
def pipeline(rig: Rig) -> Pipeline:
    """A job whose first run has used sequence numbers, committed, and left tasks and rows."""
    control = rig.control()
    links = [rig.link(address) for address in (D0, S1, S2)]
    job = rig.start(control, links[0])
    made = Pipeline(rig, control, *links, job)
    run = RunKey(job, 1)
    ops = [
        send(S1, job, 1),
        send(S1, job, 2),
        PutRows(S2, run, 7, ROWS),
        send(S2, job, 1),
        send(S2, job, 2),
        commit(job, seq=3, completes=("early",)),
        held(job, "open", "never", epoch=1),
        held(job, "early-too", "early", epoch=1),
        Record(run, "first"),
    ]
    assert made.draft.write(ops) == [Code.OK] * len(ops)
    assert made.first.write([send(D0, job, 1, sender=S1)]) == [Code.OK]
    return made


def test_the_second_run_begins_with_the_fields_of_the_job_and_the_next_epoch(
    pipeline: Pipeline,
) -> None:
    pipeline.read_all()
    run = pipeline.second_run()
    (submit,) = pipeline.draft.read(1.0).envelopes
    assert isinstance(submit.message, Submit)
    assert submit.message.run == run
    assert submit.message.fields == (("prompt", "p"),)
    assert pipeline.control.job(pipeline.job)["epoch"] == "2"
    assert pipeline.control.running() == [pipeline.job]
    assert pipeline.control.queued() == []


def test_its_sequence_numbers_begin_at_one_for_every_pair(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    written = [send(S1, job, 1, epoch=2), send(S2, job, 1, epoch=2), send(S1, job, 2, epoch=2)]
    assert pipeline.draft.write(written) == [Code.OK] * 3
    assert pipeline.first.write([send(D0, job, 1, sender=S1, epoch=2)]) == [Code.OK]
    found = pipeline.read_all()
    assert [(e.sender, e.seq) for e in found["s1"]] == [(D0, 1), (D0, 2)]
    assert [(e.sender, e.seq) for e in found["s2"]] == [(D0, 1)]
    assert [(e.sender, e.seq) for e in found["d0"]] == [(S1, 1)]


def test_its_commits_number_prunes_from_one_and_go_on_at_the_offset(pipeline: Pipeline) -> None:
    """The output and its length belong to the job, not to the run."""
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    assert pipeline.control.job(job)["offset"] == "2"
    assert pipeline.draft.write([commit(job, 1, seq=1, epoch=2)]) == [Code.DUP]
    assert pipeline.draft.write([commit(job, 2, seq=0, epoch=2)]) == [Code.GAP]
    assert pipeline.draft.write([commit(job, 2, seq=1, epoch=2)]) == [Code.OK]
    found = pipeline.read_all()
    for address in ("s1", "s2"):
        (prune,) = found[address]
        assert (prune.seq, prune.message) == (1, Prune(RunKey(job, 2), 2, (2,), 3, ()))
    offsets = [entry.fields["offset"] for entry in pipeline.output()]
    assert offsets == ["0", "1"]


def test_its_graph_is_empty(pipeline: Pipeline) -> None:
    """Completed tasks, held tasks and used names of the first run have no effect."""
    job = pipeline.job
    run = pipeline.second_run()
    pipeline.read_all()
    draft = pipeline.draft
    assert draft.write([Complete(run, ("never",))]) == [Code.OK]
    assert pipeline.second.read(0.05).envelopes == (), "held by the first run"
    assert draft.write([held(job, "early-too", "early", epoch=2)]) == [Code.OK]
    assert pipeline.second.read(0.05).envelopes == (), "completed in the first run"
    assert draft.write([held(job, "open", "never", epoch=2)]) == [Code.OK]
    assert draft.write([Complete(run, ("early",))]) == [Code.OK]
    envelopes = pipeline.second.read(1.0).envelopes
    assert [(e.sender, e.seq, e.message) for e in envelopes] == [
        (GRAPH, 1, Synced(run, "open")),
        (GRAPH, 2, Synced(run, "early-too")),
    ]


# ---- what the first run still writes -------------------------------------------------------------


def late_writes(job: str) -> list[Op]:
    """The first run's next writes; each would be accepted if it were still running."""
    run = RunKey(job, 1)
    return [
        send(S1, job, 4),
        held(job, "late", epoch=1),
        Complete(run, ("never",)),
        commit(job, 2, seq=4, completes=("never",)),
        OpenJob(run, (1, 2, 3), "another"),
        Finish(run, "error", "too late", {}),
    ]


def late_rows(job: str) -> Op:
    return PutRows(S2, RunKey(job, 1), 7, -ROWS)


def steps_of_the_second_run(job: str) -> list[Op]:
    """Each uses state that the first run's late writes would change."""
    run = RunKey(job, 2)
    return [
        send(S1, job, 1, epoch=2),
        held(job, "late", "never", epoch=2),
        PutRows(S2, run, 7, ROWS),
        send(S2, job, 1, epoch=2),
        commit(job, 2, seq=2, epoch=2),
        commit(job, 3, seq=3, epoch=2, completes=("never",)),
        send(S1, job, 4, epoch=2),
        Finish(run, "length", "", {}),
    ]


def assert_second_run_arrived_whole(pipeline: Pipeline, found: Sequence[Envelope]) -> None:
    """``found``: what the second stage read of ``steps_of_the_second_run``."""
    run = RunKey(pipeline.job, 2)
    assert [(e.sender, e.seq, e.message) for e in found] == [
        (D0, 1, Close(run)),
        (D0, 2, Prune(run, 2, (2,), 3, ())),
        (D0, 3, Prune(run, 3, (3,), 4, ())),
        (GRAPH, 1, Synced(run, "late")),
    ]
    assert (pipeline.second.take_rows(run, 7) == ROWS).all()
    assert [entry.fields["kind"] for entry in pipeline.output()] == ["tokens"] * 3 + ["end"]
    job = pipeline.control.job(pipeline.job)
    assert (job["offset"], job["emitted"], job["state"]) == ("4", "3", "done")


def test_late_writes_in_any_order_are_stale_and_change_nothing(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    steps = steps_of_the_second_run(job)
    middle = 4
    assert pipeline.draft.write(steps[:middle]) == [Code.OK] * middle
    before = pipeline.facts()
    read = pipeline.read_all()
    for number, order in enumerate(itertools.permutations(late_writes(job))):
        ops = list(order)
        at = number % (len(ops) + 1)
        ops.insert(at, late_rows(job))
        codes = pipeline.draft.write(ops)
        assert codes.pop(at) is Code.OK, "rows only have an effect under their run's key"
        assert codes == [Code.STALE] * len(order)
    assert pipeline.first.write([send(D0, job, 2, sender=S1)]) == [Code.STALE]
    assert pipeline.first.write([send(D0, job, 1, sender=S1)]) == [Code.STALE]
    assert pipeline.facts() == before
    assert set(pipeline.read_all().values()) == {()}
    assert pipeline.draft.write(steps[middle:]) == [Code.OK] * (len(steps) - middle)
    assert_second_run_arrived_whole(pipeline, read["s2"] + pipeline.read_all()["s2"])


def test_late_writes_between_any_two_steps_change_nothing(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    for step in steps_of_the_second_run(job):
        late = late_writes(job)
        assert pipeline.draft.write([late_rows(job), *late])[1:] == [Code.STALE] * len(late)
        assert pipeline.draft.write([step]) == [Code.OK]
    assert_second_run_arrived_whole(pipeline, pipeline.read_all()["s2"])


def test_writes_of_either_run_are_stale_while_the_job_waits(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.rig.requeue(job)
    pipeline.read_all()
    late = late_writes(job)
    before = pipeline.facts()
    assert pipeline.draft.write(late) == [Code.STALE] * len(late)
    early = steps_of_the_second_run(job)
    fenced = [op for op in early if not isinstance(op, PutRows)]
    assert pipeline.draft.write(fenced) == [Code.STALE] * len(fenced)
    assert pipeline.facts() == before
    assert set(pipeline.read_all().values()) == {()}


def test_revoking_the_second_run_ends_both(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    assert pipeline.control.revoke(job, "cancelled") is Code.OK
    for address, found in pipeline.read_all().items():
        assert [envelope.message for envelope in found] == [Revoke(RunKey(job, 3))], address
    before = pipeline.facts()
    late = late_writes(job) + steps_of_the_second_run(job)
    fenced = [op for op in late if not isinstance(op, PutRows)]
    assert pipeline.draft.write(fenced) == [Code.STALE] * len(fenced)
    assert pipeline.facts() == before
    assert set(pipeline.read_all().values()) == {()}


def test_a_job_that_waits_for_its_second_run_can_be_revoked(pipeline: Pipeline) -> None:
    job = pipeline.job
    pipeline.rig.requeue(job)
    pipeline.read_all()
    assert pipeline.control.revoke(job, "cancelled") is Code.OK
    assert pipeline.control.queued() == []
    assert set(pipeline.read_all().values()) == {()}, "no worker has it"
    late = late_writes(job)
    assert pipeline.draft.write(late) == [Code.STALE] * len(late)
    assert pipeline.control.job(job)["state"] == "done"


# ---- what has no fence ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_rows_of_both_runs_with_one_segment_number_are_kept_apart(
    pipeline: Pipeline, order: tuple[int, int]
) -> None:
    job = pipeline.job
    pipeline.second_run()
    pipeline.read_all()
    second = pipeline.second
    second.drop_rows(RunKey(job, 1), 7)
    for segment in (7, 8, 9, 10):
        pipeline.draft.write(
            [PutRows(S2, RunKey(job, epoch), segment, epoch * ROWS) for epoch in order]
        )
    pipeline.draft.write([send(S2, job, 1, epoch=2)])
    second.read(1.0)
    assert (second.take_rows(RunKey(job, 2), 7) == 2 * ROWS).all()
    with pytest.raises(GapError):
        second.take_rows(RunKey(job, 2), 7)
    assert (second.take_rows(RunKey(job, 1), 7) == ROWS).all()
    second.drop_rows(RunKey(job, 1), 8)
    with pytest.raises(GapError):
        second.take_rows(RunKey(job, 1), 8)
    assert (second.take_rows(RunKey(job, 2), 8) == 2 * ROWS).all()
    second.forget(RunKey(job, 1))
    with pytest.raises(GapError):
        second.take_rows(RunKey(job, 1), 9)
    assert (second.take_rows(RunKey(job, 2), 9) == 2 * ROWS).all()
    second.forget(RunKey(job, 2))
    with pytest.raises(GapError):
        second.take_rows(RunKey(job, 2), 10)


def test_the_newest_run_that_has_a_recording_is_the_one_that_is_read(pipeline: Pipeline) -> None:
    job = pipeline.job
    run = pipeline.second_run()
    assert pipeline.control.read_recording(job) == ["first"]
    late = Record(RunKey(job, 1), "late")
    assert pipeline.draft.write([Record(run, "second"), late]) == [Code.OK] * 2
    assert pipeline.control.read_recording(job) == ["second"]
