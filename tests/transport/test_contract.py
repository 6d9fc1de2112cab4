"""The broker's contract, one body over the in-memory broker and a real server."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from flowspec.core.protocol.addresses import GRAPH
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.graph import Task, TaskGraph
from flowspec.core.protocol.machine import Complete, Finish, OpenJob
from flowspec.core.protocol.messages import (
    Close,
    Envelope,
    Fault,
    Open,
    Prune,
    Revoke,
    Segment,
    Submit,
    Synced,
)
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import GapError
from flowspec.rehearse import emulated_link
from flowspec.transport.base import TRIM_ENTRIES, PutRows, Record
from flowspec.transport.control import redis_control
from flowspec.transport.link import live_link, recorded
from tests.addresses import D0, M1, S1, S2
from tests.transport import memory, memory_control
from tests.transport.conftest import Rig, bundle, commit, send
from tests.transport.memory import MemoryBroker
from tests.waiting import seconds_of, until

#: Live links have no stamps: they are for emulated workers.
EMULATED_LINKS = pytest.mark.parametrize("rig", ["memory", "redis"], indirect=True)

# ---- messages ------------------------------------------------------------------------------------


def test_a_message_arrives_once_in_order_with_its_sender_and_number(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    codes = draft.write([send(S1, job, 1), send(S1, job, 2), send(S2, job, 1)])
    assert codes == [Code.OK] * 3
    delivery = stage.read(1.0)
    assert [(envelope.sender, envelope.seq) for envelope in delivery.envelopes] == [
        (D0, 1),
        (D0, 2),
    ]
    assert delivery.envelopes[0].message == Close(RunKey(job, 1))
    assert stage.read(0.0).envelopes == ()


def test_sending_again_after_an_unknown_outcome_is_harmless(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    assert draft.write([send(S1, job, 1), send(S1, job, 1)]) == [Code.OK, Code.DUP]
    assert draft.write([send(S1, job, 3)]) == [Code.OK], "the second may have gone straight"
    assert draft.write([send(S1, job, 2)]) == [Code.DUP]
    found = [*stage.read(0.2).envelopes, *stage.read(0.2).envelopes]
    assert [envelope.seq for envelope in found] == [1, 3]


def test_only_the_owner_of_the_epoch_is_heard(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    assert draft.write([send(S1, job, 1, epoch=2), send(S1, job, 1, epoch=0)]) == [Code.STALE] * 2
    assert draft.write([send(S1, "unknown", 1)]) == [Code.STALE]
    assert control.revoke(job, "cancelled") is Code.OK
    late = [send(S1, job, 1), commit(job), Complete(RunKey(job, 1), ("t",))]
    assert draft.write(late) == [Code.STALE] * 3
    (revoke,) = stage.read(0.2).envelopes
    assert revoke.message == Revoke(RunKey(job, 2))


def test_a_reader_waits_and_is_woken(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    assert seconds_of(lambda: stage.read(0.15)) > 0.1
    writer = threading.Timer(0.1, lambda: draft.write([send(S1, job, 1)]))
    writer.start()
    assert len(until(lambda: stage.read(2.0).envelopes)) == 1
    writer.join()


def test_a_new_reader_begins_behind_what_was_written_before(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([send(S1, job, 1)])
    later = rig.link(S1)
    assert later.read(0.0).envelopes == ()
    draft.write([send(S1, job, 2)])
    assert len(later.read(1.0).envelopes) == 1


def test_a_bundle_arrives_as_one_entry_with_rows_of_every_run(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    jobs = [rig.start(control, draft) for _ in range(3)]
    segments = [Segment(RunKey(job, 1), 4, 0, (7,), (6,), (7,)) for job in jobs]
    rows = [np.full((1, 4), at, np.float32) for at in range(3)]
    ops = [PutRows(S1, one.run, 4, own) for one, own in zip(segments, rows, strict=True)]
    assert draft.write([*ops, bundle(S1, *segments[:2]), bundle(S1, segments[2])]) == [Code.OK] * 6
    found = stage.read(1.0).envelopes
    assert [envelope.message for envelope in found] == segments
    assert [(envelope.sender, envelope.seq) for envelope in found] == [(D0, 1)] * 3
    first, second, alone = (envelope.bundle for envelope in found)
    assert first == second > 0
    assert alone == 0
    for one, own in zip(segments, rows, strict=True):
        assert (stage.take_rows(one.run, 4) == own).all()
    later = [replace(one, segment=5) for one in segments[:2]]
    assert draft.write([bundle(S1, *later, seq=2)]) == [Code.OK] * 2
    assert {envelope.bundle for envelope in stage.read(1.0).envelopes}.isdisjoint({0, first})


def test_a_part_of_a_bundle_that_is_not_heard_is_left_out_alone(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    ended, sound, again, other = (rig.start(control, draft) for _ in range(4))
    draft.write([send(S1, again, 1)])
    assert control.revoke(ended, "cancelled") is Code.OK
    segments = [
        Segment(RunKey(job, epoch), 0, 0, (7,), (6,), (7,))
        for job, epoch in ((ended, 1), (sound, 1), (again, 1), (other, 2))
    ]
    codes = draft.write([bundle(S1, *segments)])
    assert codes == [Code.STALE, Code.OK, Code.DUP, Code.STALE]
    delivered = [*stage.read(0.3).envelopes, *stage.read(0.3).envelopes]
    found = [one.message for one in delivered if isinstance(one.message, Segment)]
    assert found == [segments[1]]
    assert draft.write([bundle(S1, *segments)]) == [Code.STALE, Code.DUP, Code.DUP, Code.STALE]
    assert draft.write([send(S1, sound, 2)]) == [Code.OK], "every run has its own numbers"


@EMULATED_LINKS
def test_a_bundle_has_one_stamp(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    jobs = [rig.start(control, draft) for _ in range(2)]
    segments = [Segment(RunKey(job, 1), 0, 0, (7,), (6,), (7,)) for job in jobs]
    stamp = Stamp(0.5, D0)
    assert draft.write([bundle(S1, *segments)], [stamp]) == [Code.OK] * 2
    assert stage.read(1.0).stamps == (stamp, stamp)


def test_rows_travel_beside_their_envelope_and_are_taken_once(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S2)
    job = rig.start(control, draft)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    draft.write([PutRows(S2, RunKey(job, 1), 7, rows), send(S2, job, 1)])
    assert len(stage.read(1.0).envelopes) == 1
    assert (stage.take_rows(RunKey(job, 1), 7) == rows).all()
    with pytest.raises(GapError, match="rows of segment 7 did not arrive"):
        stage.take_rows(RunKey(job, 1), 7)
    draft.write(
        [
            PutRows(S2, RunKey(job, 1), 8, rows),
            PutRows(S2, RunKey(job, 1), 9, rows),
            send(S2, job, 2),
        ]
    )
    stage.read(1.0)
    stage.drop_rows(RunKey(job, 1), 8)
    with pytest.raises(GapError):
        stage.take_rows(RunKey(job, 1), 8)
    stage.forget(RunKey(job, 1))
    with pytest.raises(GapError):
        stage.take_rows(RunKey(job, 1), 9)


def test_late_rows_of_a_forgotten_run_are_dropped(rig: Rig) -> None:
    draft = rig.link(D0)
    stage = rig.link(S2)
    job = rig.start(rig.control(), draft)
    ended, later = RunKey(job, 1), RunKey(job, 2)
    rows = np.ones((1, 4), dtype=np.float32)
    stage.forget(ended)
    draft.write([PutRows(S2, ended, 3, rows), PutRows(S2, later, 3, rows), send(S2, job, 1)])
    stage.read(1.0)
    with pytest.raises(GapError):
        stage.take_rows(ended, 3)
    assert (stage.take_rows(later, 3) == rows).all()


def test_rows_are_written_even_beyond_their_cap_and_the_writer_learns_of_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (memory, emulated_link, live_link):
        monkeypatch.setattr(place, "ROWS_CAP", 2)
    for place in (emulated_link, live_link):
        monkeypatch.setattr(place, "_MEASURE_EVERY", 1)
    draft = rig.link(D0)
    stage = rig.link(S2)
    run = RunKey(rig.start(rig.control(), draft), 1)
    rows = np.ones((1, 4), dtype=np.float32)
    codes = [draft.write([PutRows(S2, run, segment, rows)])[0] for segment in range(3)]
    assert codes == [Code.OK, Code.OK, Code.FULL]
    stage.read(1.0)
    assert all((stage.take_rows(run, segment) == rows).all() for segment in range(3))


def test_a_recording_ends_at_its_cap(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (memory, recorded):
        monkeypatch.setattr(place, "RECORDING_CAP", 2)
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    assert draft.write([Record(RunKey(job, 1), str(at)) for at in range(3)]) == [Code.OK] * 3
    assert [*control.read_recording(job)] == ["0", "1"]


@EMULATED_LINKS
def test_stamps_travel_beside_envelopes_and_only_if_given(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    draft.write([send(S1, job, 1), send(S2, job, 1)])
    assert stage.read(1.0).stamps == ()
    other = Stamp(1.5, GRAPH)
    draft.write([send(S1, job, 2), send(S2, job, 2)], [Stamp(1.25, D0), other])
    assert stage.read(1.0).stamps == (Stamp(1.25, D0),), "its own"
    draft.write([commit(job, seq=3)], [Stamp(1e-7, D0)])
    assert stage.read(1.0).stamps == (Stamp(1e-7, D0),)
    assert [entry.fields["at"] for entry in control.read_output(job, "0", 1.0)] == ["1e-07"]


@EMULATED_LINKS
def test_what_the_graph_held_goes_with_the_latest_stamp_it_waited_for(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    first = rig.link(S1)
    second = rig.link(S2)
    job = rig.start(control, draft)
    held = {"sender": GRAPH, "after": ("a", "b")}
    draft.write([send(S2, job, 0, Synced(RunKey(job, 1), "x"), task="x", **held)], [Stamp(2.0, D0)])
    first.write([Complete(RunKey(job, 1), ("a",))], [Stamp(5.5, S1)])
    assert second.read(0.0).envelopes == ()
    draft.write([Complete(RunKey(job, 1), ("b",))], [Stamp(3.0, D0)])
    assert second.read(1.0).stamps == (Stamp(5.5, S1),), "not the one that released it"
    draft.write([send(S2, job, 0, Synced(RunKey(job, 1), "y"), task="y", **held)], [Stamp(4.0, D0)])
    draft.write([send(S2, job, 0, Synced(RunKey(job, 1), "z"), task="z", **held)], [Stamp(7.0, D0)])
    delivery = second.read(1.0)
    assert delivery.stamps == (Stamp(5.5, S1), Stamp(7.0, D0))
    draft.write(
        [send(S2, job, 0, Synced(RunKey(job, 1), "w"), task="w", sender=GRAPH, after=("v",))],
        [Stamp(9.0, D0)],
    )
    draft.write([commit(job, completes=("v",))], [Stamp(8.0, D0)])
    *_, last = second.read(1.0).stamps
    assert last == Stamp(9.0, D0), "not before it was made"


@EMULATED_LINKS
def test_a_write_without_a_stamp_leaves_the_stamps_a_task_has_collected(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S2)
    job = rig.start(control, draft)
    run = RunKey(job, 1)
    held = {"sender": GRAPH, "after": ("a",)}
    draft.write([send(S2, job, 0, Synced(run, "x"), task="x", **held)], [Stamp(2.0, D0)])
    draft.write([Complete(run, ("a",))])
    assert stage.read(1.0).stamps == (Stamp(2.0, D0),)


def cap_logs(rig: Rig, monkeypatch: pytest.MonkeyPatch, cap: int) -> None:
    """Let ``cap`` entries of a run wait in a log, and remove them as soon as they are read."""
    monkeypatch.setattr("flowspec.transport.link.commands.LOG_CAP", cap)
    monkeypatch.setattr("flowspec.transport.link.log_reader.TRIM_ENTRIES", 1)
    if rig.memory is not None:
        rig.memory = MemoryBroker(log_cap=cap)


def test_a_log_has_room_again_for_a_run_once_its_entries_are_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_logs(rig, monkeypatch, 2)
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    opening = Open(RunKey(job, 1), 3, 64, Sampling())
    assert draft.write([send(S1, job, 1, opening), send(S1, job, 2)]) == [Code.OK, Code.OK]
    for seq in (3, 5, 7):
        assert draft.write([send(S1, job, seq)]) == [Code.FULL]
        assert draft.write([commit(job, seq=seq)]) == [Code.FULL]
        assert len(stage.read(1.0).envelopes) == 2
        stage.read(0.01)
        if seq < 7:
            assert draft.write([send(S1, job, seq), send(S1, job, seq + 1)]) == [Code.OK] * 2


def test_a_run_that_fills_a_log_leaves_others_their_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap_logs(rig, monkeypatch, 2)
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    full, other = (rig.start(control, draft) for _ in range(2))
    codes = [draft.write([send(S1, full, seq)])[0] for seq in (1, 2, 3)]
    assert codes == [Code.OK, Code.OK, Code.FULL]
    assert draft.write([send(S1, other, 1), commit(other, seq=2)]) == [Code.OK] * 2
    runs = [envelope.message.run.job for envelope in stage.read(1.0).envelopes]
    assert runs == [full, full, other, other]


def test_the_oldest_of_many_jobs_may_be_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 jobs at two entries a token in every stage's log; the oldest has 8,000 tokens."""
    cap_logs(rig, monkeypatch, 8_000)
    monkeypatch.setattr("flowspec.transport.link.log_reader.TRIM_ENTRIES", TRIM_ENTRIES)
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    jobs = [rig.start(control, draft) for _ in range(16)]
    lengths = dict.fromkeys(jobs, 100) | {jobs[0]: 8_000}
    read = 0
    for first in range(1, 8_001, 50):
        ops = [
            op
            for job in jobs
            for token in range(first, min(first + 50, lengths[job] + 1))
            for op in (send(S1, job, 2 * token - 1), commit(job, offset=token, seq=2 * token))
        ]
        assert set(draft.write(ops)) == {Code.OK}
        read += len(stage.read(1.0).envelopes)
    read += len(stage.read(0.0).envelopes)
    assert read == 2 * sum(lengths.values())


# ---- commits -------------------------------------------------------------------------------------


def test_a_commit_moves_output_offset_and_every_log_together(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    first = rig.link(S1)
    second = rig.link(S2)
    job = rig.start(control, draft)
    assert draft.write([commit(job), commit(job, 2, seq=2, finish="length")]) == [Code.OK] * 2
    for stage in (first, second):
        prunes = [envelope.message for envelope in stage.read(1.0).envelopes]
        assert prunes == [
            Prune(RunKey(job, 1), 1, (1,), 2, ()),
            Prune(RunKey(job, 1), 2, (2,), 3, ()),
        ]
    entries = [entry.fields for entry in control.read_output(job, "0", 1.0)]
    assert entries == [
        {"kind": "tokens", "offset": "0", "ids": "[41]", "text": "t1", "sizes": "[2]"},
        {
            "kind": "tokens",
            "offset": "1",
            "ids": "[42]",
            "text": "t2",
            "sizes": "[2]",
            "finish_reason": "length",
        },
    ]


def test_a_commit_answers_dup_gap_and_stale_and_changes_nothing_then(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    assert draft.write([commit(job, 2)]) == [Code.GAP], "the offset is not reached yet"
    assert draft.write([commit(job, seq=0)]) == [Code.GAP], "its number is known already"
    assert draft.write([commit(job, epoch=2)]) == [Code.STALE]
    assert control.read_output(job, "0", 0.05) == []
    assert stage.read(0.0).envelopes == ()
    assert draft.write([commit(job), commit(job)]) == [Code.OK, Code.DUP]
    assert len(control.read_output(job, "0", 0.2)) == 1
    assert len(stage.read(0.2).envelopes) == 1


def test_commits_need_an_opened_job_and_opening_twice_is_dup(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = control.submit({"prompt": "p"})
    control.admit(job, control.read_intake(1.0)[0].fields)
    control.assign(job, 1, {})
    assert draft.write([commit(job)]) == [Code.GAP]
    opened = OpenJob(RunKey(job, 1), (5, 6), "x")
    again = OpenJob(RunKey(job, 1), (5,), "x")
    assert draft.write([opened, again]) == [Code.OK, Code.DUP]
    assert json.loads(control.job(job)["prompt_token_ids"]) == [5, 6]


def test_output_is_read_from_a_cursor(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([commit(job)])
    (first,) = control.read_output(job, "0", 1.0)
    draft.write([commit(job, 2, seq=2)])
    (second,) = control.read_output(job, first.cursor, 1.0)
    assert second.fields["offset"] == "1"
    assert control.read_output(job, second.cursor, 0.05) == []


# ---- the graph -----------------------------------------------------------------------------------


def test_a_task_goes_when_its_dependencies_are_complete(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    held = send(S1, job, 0, sender=GRAPH, task="pass", after=("sync",))
    join = send(
        D0, job, 0, Synced(RunKey(job, 1), "sync"), sender=GRAPH, task="sync", after=("a", "b")
    )
    assert draft.write([held, join, held]) == [Code.OK, Code.OK, Code.DUP]
    draft.write([Complete(RunKey(job, 1), ("a",))])
    assert stage.read(0.05).envelopes == ()
    draft.write([send(S2, job, 1, completes=("b",))])
    (synced,) = draft.read(1.0).envelopes
    assert (synced.sender, synced.seq, synced.message) == (GRAPH, 1, Synced(RunKey(job, 1), "sync"))
    assert stage.read(0.05).envelopes == (), (
        "a task with an envelope completes when its receiver reports it"
    )
    draft.write([Complete(RunKey(job, 1), ("sync",))])
    (released,) = stage.read(1.0).envelopes
    assert (released.sender, released.seq) == (GRAPH, 1)


def test_a_commit_completes_tasks_behind_its_prunes(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    draft.write([send(S1, job, 0, sender=GRAPH, task="next", after=("verdict",))])
    draft.write([commit(job, completes=("verdict",))])
    kinds = [type(envelope.message) for envelope in stage.read(1.0).envelopes]
    assert kinds == [Prune, Close]


def test_a_commit_lets_go_tasks_of_every_worker(rig: Rig) -> None:
    rig.middles = 1
    control = rig.control()
    draft = rig.link(D0)
    middle = rig.link(M1)
    job = rig.start(control, draft)
    run = RunKey(job, 1)
    held = {"sender": GRAPH, "after": ("verdict",)}
    for to in (M1, D0):
        message = Synced(run, str(to))
        assert draft.write([send(to, job, 0, message, task=str(to), **held)]) == [Code.OK]
    assert draft.write([commit(job, completes=("verdict",))]) == [Code.OK]
    for link in (middle, draft):
        (released,) = link.read(1.0).envelopes
        assert (released.sender, released.seq) == (GRAPH, 1)
        assert released.message == Synced(run, str(link.address))


def test_random_graphs_release_what_the_pure_graph_releases(rig: Rig) -> None:
    """Run the same random steps through the pure graph and the broker's."""
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S1)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        job = rig.start(control, draft)
        pure = TaskGraph()
        wanted = []
        ops = []
        for number in range(14):
            after = tuple(f"t{n}" for n in rng.integers(0, 16, rng.integers(0, 4)))
            envelope = Envelope(GRAPH, 0, Synced(RunKey(job, 1), f"t{number}"))
            completes = tuple(f"t{n}" for n in rng.integers(0, 16, rng.integers(0, 2)))
            task = Task(f"t{number}", after, S1, envelope)
            wanted += [released.task.name for released in pure.apply(completes, (task,))]
            ops.append(
                send(
                    S1,
                    job,
                    0,
                    envelope.message,
                    sender=GRAPH,
                    task=task.name,
                    after=after,
                    completes=completes,
                )
            )
        draft.write(ops)
        got = stage.read(0.1).envelopes
        assert [envelope.message.task for envelope in got] == wanted, f"seed {seed}"  # type: ignore[union-attr]
        assert [envelope.seq for envelope in got] == list(range(1, len(got) + 1))


# ---- jobs ----------------------------------------------------------------------------------------


def test_admission_is_repeatable(rig: Rig) -> None:
    control = rig.control()
    job = control.submit({"prompt": "hello", "seed": "3"})
    (intake,) = control.read_intake(1.0)
    assert intake.job == job
    assert intake.fields == {"prompt": "hello", "seed": "3"}
    assert control.read_intake(0.05) == [intake], "unacknowledged submissions are read again"
    assert control.submitted(job)
    assert control.admit(job, intake.fields) is Code.OK
    assert control.admit(job, intake.fields) is Code.DUP
    control.acknowledge([job])
    assert not control.submitted(job)
    assert control.read_intake(0.05) == []
    assert control.queued() == [job]
    assert control.job(job)["state"] == "queued"


def test_a_refused_job_gets_its_error_in_its_output(rig: Rig) -> None:
    control = rig.control()
    job = control.submit({"prompt": ""})
    control.admit(job, {"prompt": ""}, "the prompt is empty")
    entries = [entry.fields for entry in control.read_output(job, "0", 1.0)]
    assert entries == [
        {"kind": "error", "text": "the prompt is empty", "cause": "refused"},
        {"kind": "end", "finish_reason": "error"},
    ]
    assert control.queued() == []
    assert control.job(job)["state"] == "done"


def test_a_refused_job_is_no_duplicate_whatever_key_it_has(rig: Rig) -> None:
    control = rig.control()
    fields = {"prompt": "p", "idempotency_key": "mine"}
    first = control.submit(fields)
    second = control.submit(fields)
    assert control.admit(first, fields) is Code.OK
    assert control.admit(second, fields, "no such strategy") is Code.OK
    assert [entry.fields for entry in control.read_output(second, "0", 1.0)] == [
        {"kind": "error", "text": "no such strategy", "cause": "refused"},
        {"kind": "end", "finish_reason": "error"},
    ]


@pytest.mark.parametrize("why", ["refused", "full", "duplicate"])
def test_of_a_job_that_was_not_queued_only_its_end_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    control = rig.control()
    fields = {"prompt": "p", "idempotency_key": "mine"}
    first = control.submit(fields)
    job = control.submit(fields)
    error = ""
    wanted = Code.OK
    if why == "refused":
        error = "no such strategy"
    elif why == "full":
        for module in (redis_control, memory_control):
            monkeypatch.setattr(module, "QUEUE_CAP", 0)
        wanted = Code.FULL
    else:
        control.admit(first, fields)
        wanted = Code.DUP
    assert control.admit(job, fields, error) is wanted
    assert control.job(job) == {"state": "done", "epoch": "0", "finish_reason": "error"}


def test_of_a_job_nobody_knows_there_is_nothing(rig: Rig) -> None:
    control = rig.control()
    assert control.job("1-0") == {}
    assert not control.submitted("1-0")
    assert not control.submitted("no id at all")
    assert control.holders("1-0") == {}
    assert control.read_output("1-0", "0", 0.01) == []
    assert control.read_recording("1-0") == []


def test_an_idempotency_key_names_one_job(rig: Rig) -> None:
    control = rig.control()
    fields = {"prompt": "p", "idempotency_key": "mine"}
    first = control.submit(fields)
    second = control.submit(fields)
    assert control.admit(first, fields) is Code.OK
    assert control.admit(second, fields) is Code.DUP
    assert control.queued() == [first]
    entry = control.read_output(second, "0", 1.0)[0].fields
    assert entry["duplicate_of"] == first
    assert control.admit(first, fields) is Code.DUP, (
        "read again, the first is not a duplicate of itself"
    )


def test_an_idempotency_key_with_other_fields_is_refused(rig: Rig) -> None:
    control = rig.control()
    fields = {"prompt": "p", "idempotency_key": "mine"}
    first, second = (control.submit(fields) for _ in range(2))
    assert control.admit(first, fields) is Code.OK
    assert control.admit(second, fields | {"prompt": "q"}) is Code.DUP
    assert control.queued() == [first]
    assert [entry.fields for entry in control.read_output(second, "0", 1.0)] == [
        {
            "kind": "error",
            "text": f"the idempotency key belongs to job {first} with other fields; "
            "use another key",
            "cause": "refused",
        },
        {"kind": "end", "finish_reason": "error"},
    ]


@pytest.mark.parametrize("how", ["finished", "revoked", "cancelled"])
def test_a_failed_job_gives_its_idempotency_key_up(rig: Rig, how: str) -> None:
    control = rig.control()
    draft = rig.link(D0)
    fields = {"prompt": "p", "idempotency_key": "mine"}
    first = rig.start(control, draft, idempotency_key="mine")
    if how == "finished":
        assert draft.write([Finish(RunKey(first, 1), "error", "no", {})]) == [Code.OK]
    else:
        reason = "cancelled" if how == "cancelled" else "error"
        assert control.revoke(first, reason, "no") is Code.OK
    second = control.submit(fields)
    wanted = Code.DUP if how == "cancelled" else Code.OK
    assert control.admit(second, fields) is wanted
    third = control.submit(fields)
    assert control.admit(third, fields) is Code.DUP
    known = control.read_output(third, "0", 1.0)[0].fields
    assert known["duplicate_of"] == (first if how == "cancelled" else second)


def test_waiting_jobs_are_assigned_while_there_is_room(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    jobs = [control.submit({"prompt": str(at)}) for at in range(3)]
    for intake in control.read_intake(1.0):
        control.admit(intake.job, intake.fields)
    assert [control.assign(job, 2, {}) for job in jobs] == [Code.OK, Code.OK, Code.FULL]
    assert control.assign(jobs[0], 3, {}) is Code.GAP, "it waits no longer"
    submits = [envelope.message for envelope in draft.read(1.0).envelopes]
    assert all(isinstance(submit, Submit) for submit in submits)
    assert (
        [replace(submit, queued_seconds=0.0) for submit in submits]
        == [  # type: ignore[type-var]
            Submit(RunKey(job, 1), (("prompt", str(at)),)) for at, job in enumerate(jobs[:2])
        ]
    )
    assert control.running() == sorted(jobs[:2])
    assert control.job(jobs[0])["epoch"] == "1"


def test_the_draft_worker_is_told_how_long_a_job_has_waited(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = ""

    def wait_and_begin() -> None:
        nonlocal job
        job = control.submit({"prompt": "p"})
        time.sleep(0.2)
        control.admit(job, {"prompt": "p"})
        control.assign(job, 1, {})

    most = seconds_of(wait_and_begin)
    (submit,) = draft.read(1.0).envelopes
    assert isinstance(submit.message, Submit)
    assert 0.2 <= submit.message.queued_seconds <= most + 0.01


def test_finish_ends_a_job_once_and_makes_room(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    finish = Finish(RunKey(job, 1), "length", "", {"tokens": 3, "rows": {"useful": None}})
    assert draft.write([finish, finish]) == [Code.OK, Code.STALE]
    (end,) = control.read_output(job, "0", 1.0)
    assert (end.fields["kind"], end.fields["finish_reason"]) == ("end", "length")
    assert json.loads(end.fields["stats"]) == {"tokens": 3, "rows": {"useful": None}}
    assert control.running() == []
    assert control.revoke(job, "cancelled") is Code.DUP


def test_a_job_that_fails_says_why_before_it_ends(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    draft.write([Finish(RunKey(job, 1), "error", "stage 2 is on fire", {})])
    kinds = [
        (entry.fields["kind"], entry.fields.get("text"))
        for entry in control.read_output(job, "0", 1.0)
    ]
    assert kinds == [("error", "stage 2 is on fire"), ("end", None)]


def test_a_waiting_job_can_be_cancelled(rig: Rig) -> None:
    control = rig.control()
    job = control.submit({"prompt": "p"})
    control.admit(job, {"prompt": "p"})
    assert control.revoke(job, "cancelled") is Code.OK
    assert control.queued() == []
    (end,) = control.read_output(job, "0", 1.0)
    assert end.fields["finish_reason"] == "cancelled"
    assert control.revoke("no-such-job", "cancelled") is Code.DUP


def test_recordings_are_kept_with_the_job(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    job = rig.start(control, draft)
    run = RunKey(job, 1)
    draft.write([Record(run, "one"), send(S1, job, 1), Record(run, "two")])
    assert control.read_recording(job) == ["one", "two"]


def test_a_line_that_was_written_again_is_read_once(rig: Rig) -> None:
    """As after a lost reply; lines have their worker and number, so no two are alike."""
    control = rig.control()
    draft = rig.link(D0)
    run = RunKey(rig.start(control, draft), 1)
    for _ in range(2):
        draft.write([Record(run, "one"), Record(run, "two")])
    assert control.read_recording(run.job) == ["one", "two"]


# ---- leases and the record -----------------------------------------------------------------------


def test_a_lease_has_one_holder_who_may_renew_and_release_it(rig: Rig) -> None:
    control = rig.control()
    generation = control.claim("verify-1", "me", {"pid": 1})
    assert generation
    assert not control.claim("verify-1", "you", {"pid": 2})
    assert control.claim("verify-1", "me", {"pid": 3})
    assert control.claims() == {"verify-1": ("me", {"pid": 3}, generation)}
    control.release("verify-1", "you")
    assert not control.claim("verify-1", "you", {})
    control.release("verify-1", "me")
    assert control.claim("verify-1", "you", {})
    assert not control.claim("verify-1", "yo", {}), "a prefix of a token is a different token"


def test_a_lease_that_is_not_renewed_is_free(rig: Rig) -> None:
    control = rig.control()
    assert control.claim("draft", "me", {}, 60)
    generation = control.claim("verify-1", "me", {}, 60_000)
    time.sleep(0.1)
    assert control.claims() == {"verify-1": ("me", {}, generation)}
    assert control.claim("draft", "you", {})
    assert not control.claim("verify-1", "you", {})


def test_the_pipelines_record_is_replaced_as_a_whole(rig: Rig) -> None:
    control = rig.control()
    control.set_pipeline({"stages": "2", "target": "a"})
    control.set_pipeline({"stages": "2"})
    assert control.pipeline() == {"stages": "2"}


def test_faults_reach_the_draft_worker(rig: Rig) -> None:
    control = rig.control()
    draft = rig.link(D0)
    stage = rig.link(S2)
    job = rig.start(control, draft)
    stage.write([send(D0, job, 1, Fault(RunKey(job, 1), "no"), sender=S2)])
    assert draft.read(1.0).envelopes[0].message == Fault(RunKey(job, 1), "no")
