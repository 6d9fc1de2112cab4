"""Whatever a peer sends, a stage goes on: its runs fail, and what it keeps is bounded."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.addresses import DRAFT, Address, Role
from flowspec.core.protocol.machine import Compute, Done, Output, Poll, Received, Send
from flowspec.core.protocol.messages import Envelope, Fault, Open, Segment
from flowspec.core.protocol.work import Choice, Pass, PassDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage import early, stage_worker
from flowspec.core.stage.early import EarlyMessages
from flowspec.core.stage.stage_worker import StageMachine
from tests.hostile import Hostile
from tests.marks import heavy

SEGMENT = Segment(RunKey("j", 1), 0, 0, (0, 1), (-1, 0), (0, 1), (7, 8))


def computed(outputs: list[Output]) -> list[Pass]:
    return [output.work for output in outputs if isinstance(output, Compute)]  # type: ignore[misc]


@pytest.mark.parametrize("seeds", [range(20), heavy(range(20, 370))])
def test_no_envelope_ends_a_stage(seeds: range) -> None:
    assert sum(map(passes_of, seeds)) > 20 * len(seeds), "some of it is served"


def passes_of(seed: int) -> int:
    """Passes of a worker in 300 turns."""
    hostile = Hostile(seed)
    machine = StageMachine(1, 2, generation=1)
    passes = 0
    for turn in range(300):
        now = turn / 10
        arrived = tuple(hostile.envelope() for _ in range(hostile.random.randint(1, 3)))
        if turn % 10 == 0:
            arrived = (*hostile.sound(), *arrived)
        outputs = list(machine.step(Received(arrived), now))
        while machine.runnable:
            outputs = list(machine.step(Poll(), now))
            for work in computed(outputs):
                passes += 1
                choices = tuple(Choice((5,) * len(part.answers)) for part in work.parts)
                machine.step(Done(PassDone(choices)), now)
    return passes


def early_segment(job: str, rows: int = 1) -> Envelope:
    column = tuple(range(rows))
    return Envelope(DRAFT, 1, Segment(RunKey(job, 1), 0, 0, column, column, column))


def test_early_messages_are_bounded_in_number() -> None:
    kept = EarlyMessages()
    for job in range(2 * early.EARLY_MESSAGES):
        kept.keep(early_segment(str(job)), 0.0)
    assert len(kept) == early.EARLY_MESSAGES
    assert kept.take(RunKey("0", 1)) == []
    assert len(kept.take(RunKey(str(2 * early.EARLY_MESSAGES - 1), 1))) == 1


def test_early_messages_are_bounded_in_rows() -> None:
    kept = EarlyMessages()
    for job in range(40):
        kept.keep(early_segment(str(job), 4096), 0.0)
    assert len(kept) == early.EARLY_ROWS // 4096


def test_early_messages_are_bounded_in_age() -> None:
    kept = EarlyMessages()
    kept.keep(early_segment("old"), 0.0)
    kept.keep(early_segment("young"), 30.0)
    kept.keep(early_segment("old"), 40.0)
    kept.drop_old(early.EARLY_SECONDS)
    assert kept.take(RunKey("old", 1)) == []
    assert len(kept.take(RunKey("young", 1))) == 1
    assert len(kept) == 0


def test_a_stage_drops_old_early_messages_when_others_come() -> None:
    machine = StageMachine(1, 2)
    run = SEGMENT.run
    machine.step(Received((Envelope(DRAFT, 2, SEGMENT),)), 0.0)
    opened = Envelope(DRAFT, 1, Open(run, 2, 64, Sampling()))
    machine.step(Received((opened,)), early.EARLY_SECONDS + 1)
    assert not machine.runnable


def test_a_stage_opens_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_worker, "MOST_RUNS", 3)
    machine = StageMachine(1, 2)
    for job in "abcde":
        opened = Envelope(DRAFT, 1, Open(RunKey(job, 1), 2, 64, Sampling()))
        outputs = machine.step(Received((opened,)), 0.0)
    assert len(machine.open_runs) == 3
    (fault,) = [output.envelope.message for output in outputs if isinstance(output, Send)]
    assert fault == Fault(RunKey("e", 1), "stage 1 has 3 open runs already")


def test_a_bounded_number_of_segments_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_worker, "MOST_WAITING", 2)
    machine = StageMachine(1, 2)
    opened = Open(SEGMENT.run, 2, 64, Sampling())
    sent = [opened, SEGMENT, SEGMENT, SEGMENT]
    envelopes = tuple(Envelope(DRAFT, at, message) for at, message in enumerate(sent, 1))
    outputs = machine.step(Received(envelopes), 0.0)
    (fault,) = [output.envelope.message for output in outputs if isinstance(output, Send)]
    assert fault == Fault(SEGMENT.run, "2 segments wait at stage 1 already")


def test_a_run_has_a_bounded_number_of_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.core.protocol.sequence.MOST_SENDERS", 2)
    machine = StageMachine(1, 2)
    opened = Open(SEGMENT.run, 2, 64, Sampling())
    machine.step(Received((Envelope(DRAFT, 1, opened),)), 0.0)
    outputs: list[Output] = []
    for number in (1, 2):
        sender = Address(Role.VERIFY, number)
        outputs += machine.step(Received((Envelope(sender, 1, SEGMENT),)), 0.0)
    (fault,) = [output.envelope.message for output in outputs if isinstance(output, Send)]
    assert isinstance(fault, Fault)
    assert "2 senders already" in fault.reason


def test_a_long_reason_is_cut() -> None:
    machine = StageMachine(1, 2)
    opened = Open(SEGMENT.run, 2, 64, Sampling())
    sent = (Envelope(DRAFT, 1, opened), Envelope(DRAFT, 2, SEGMENT))
    machine.step(Received(sent), 0.0)
    machine.step(Poll(), 0.0)
    (output,) = machine.step(Done(WorkFailed("x" * 5000)), 0.0)
    assert isinstance(output, Send)
    assert isinstance(output.envelope.message, Fault)
    assert len(output.envelope.message.reason) == 1000
