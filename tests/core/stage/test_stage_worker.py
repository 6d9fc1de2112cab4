"""The stage machine, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from flowspec.core.protocol.addresses import DRAFT, SCHEDULER, Address
from flowspec.core.protocol.machine import (
    Allocate,
    Complete,
    Compute,
    Discard,
    Done,
    Evict,
    Keep,
    Output,
    PassRows,
    Poll,
    Received,
    Refused,
    Release,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import (
    Answer,
    Close,
    Envelope,
    Fault,
    Hop,
    Message,
    Open,
    Prefix,
    Prune,
    Retain,
    Returns,
    Revoke,
    Segment,
    StageReport,
    Submit,
)
from flowspec.core.protocol.work import Choice, Kept, Part, Pass, PassDone, Pruned, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import Slowest, onward
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.rows.placement import ContiguousRows, Moves, Placement
from tests.addresses import S1, S2

RUN = RunKey("j", 1)
OPEN = Open(RUN, 2, 64, Sampling())
PREFILL = Segment(RUN, 0, 0, (0, 1), (-1, 0), (0, 1), (7, 8))


class Stage:
    """A machine and the sequence numbers of its senders."""

    def __init__(self, stage: int = 1, stages: int = 2) -> None:
        self.machine = StageMachine(stage, stages)
        self.seqs: dict[tuple[RunKey, Address], int] = {}
        self.parts: list[Part] = []  # of all passes so far
        self.now = 0.0

    def envelope(self, message: Message, sender: Address = DRAFT) -> Envelope:
        key = (message.run, sender)
        self.seqs[key] = self.seqs.get(key, 0) + 1
        return Envelope(sender, self.seqs[key], message)

    def receive(self, *messages: Message, sender: Address = DRAFT) -> list[Output]:
        return self.feed(*(self.envelope(message, sender) for message in messages))

    def feed(self, *envelopes: Envelope) -> list[Output]:
        return list(self.machine.step(Received(envelopes), self.now))

    def poll(self) -> list[Output]:
        outputs = list(self.machine.step(Poll(), self.now))
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, Pass):
                self.parts += output.work.parts
        return outputs

    def work(self) -> Pass:
        (work,) = [output.work for output in self.poll() if isinstance(output, Compute)]
        assert isinstance(work, Pass)
        return work

    def done(self, *tokens: Sequence[int], seconds: float = 1.0) -> list[Output]:
        self.now += seconds
        choices = tuple(Choice(tuple(row)) for row in tokens)
        return list(self.machine.step(Done(PassDone(choices)), self.now))

    def prefilled(self, root: int = 2) -> Stage:
        """Open, two prompt rows computed, and the first verdict received; ``root`` is the root."""
        self.receive(OPEN, PREFILL)
        self.poll()
        self.done((9,) if self.machine.last else ())
        self.receive(Prune(RUN, 1, (1,), root, ()))
        return self


def segment(number: int, rows: dict[int, int], **more: object) -> Segment:
    """``rows``: parent by id; the machine ignores positions."""
    ids = tuple(rows)
    return Segment(RUN, number, 1, ids, tuple(rows.values()), ids, ids, **more)  # type: ignore[arg-type]


def sent(outputs: Sequence[Output]) -> list[Message]:
    return [output.envelope.message for output in outputs if isinstance(output, Send)]


def test_open_allocates_and_a_pass_goes_to_the_next_stage_with_its_rows() -> None:
    stage = Stage()
    assert stage.receive(OPEN, PREFILL) == [Allocate(RUN, 64, Sampling(), Returns())]
    assert stage.machine.runnable
    (part,) = stage.work().parts
    assert part == Part(RUN, 0, (0, 1), (-1, 0), (0, 1), (7, 8), (0, 1), context=1)
    assert not stage.machine.runnable, "one pass at a time"
    (send,) = stage.done(())
    assert isinstance(send, Send)
    assert (send.to, send.envelope.sender, send.envelope.seq) == (S2, S1, 1)
    assert send.rows is not None
    assert send.rows.offsets == (0, 1)
    (onward,) = sent([send])
    assert isinstance(onward, Segment)
    assert onward.tokens == (), "only the first stage gets the tokens"


def test_the_last_stage_answers_for_tree_rows_and_the_prompts_last_one() -> None:
    stage = Stage(2, 2)
    stage.receive(OPEN, PREFILL)
    assert stage.work().parts[0].answers == (1,)
    assert sent(stage.done((9,))) == [Answer(RUN, 0, (1,), (9,), seconds=1.0, rows=2)]


def test_a_job_that_asks_for_hidden_rows_gets_all_of_them() -> None:
    stage = Stage(2, 2)
    stage.receive(Open(RUN, 2, 64, Sampling(), Returns(hidden=True)), PREFILL)
    assert stage.work().parts[0].answers == (0, 1)
    (send,) = stage.done((4, 9))
    assert isinstance(send, Send)
    assert send.envelope.message == Answer(RUN, 0, (0, 1), (4, 9), seconds=1.0, rows=2)
    assert send.rows is not None


def test_prunes_known_by_then_are_applied_before_a_pass() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2, 4: 2}), segment(2, {5: 3, 6: 4}))
    stage.poll()
    stage.done(())
    stage.receive(Prune(RUN, 2, (2,), 4, (4, 6)))
    part = stage.work().parts[0]
    assert part.ids == (6,)
    assert part.offsets == (1,)
    assert part.context == 0
    assert part.parents == (4,)
    assert part.pruned == Pruned(accepted=(2,), live=(4,))
    rows = ContiguousRows()
    placements = [rows.place(one) for one in stage.parts]
    assert placements[-1] == Placement(3, 4, Moves(3, (4,)), parents=(-1, 0))


def test_rows_pruned_while_they_are_computed_go_no_further() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2}))
    stage.poll()
    stage.done(())
    stage.receive(segment(2, {4: 3, 5: 2}))
    stage.poll()
    stage.receive(Prune(RUN, 2, (2,), 5, (5,)))
    (send,) = stage.done(())
    assert isinstance(send, Send)
    assert send.rows is not None
    assert send.rows.offsets == (1,)


def test_a_segment_pruned_to_nothing_is_void_and_frees_its_rows() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}), segment(2, {3: 2, 4: 3}))
    stage.poll()
    stage.done(())
    stage.receive(Prune(RUN, 2, (2,), 9, ()))
    assert stage.poll() == [Discard(RUN, 2)]
    (report, release) = stage.receive(Close(RUN))
    assert isinstance(report, Send)
    assert isinstance(report.envelope.message, StageReport)
    meter = report.envelope.message.meter
    assert (meter.prompt, meter.useful, meter.wasted, meter.void) == (2, 1, 0, 2)
    assert (meter.passes, meter.busy_seconds) == (1, 1.0)
    assert release == Release(RUN)


def test_in_lockstep_an_emptied_segment_still_travels() -> None:
    stage = Stage().prefilled(root=9)
    stage.receive(segment(1, {3: 2}, marker=True, route=(Hop("t2", ("v",)), Hop("t3"))))
    discard, send = stage.poll()
    assert discard == Discard(RUN, 1)
    assert isinstance(send, Send)
    assert (send.task, send.after, send.rows) == ("t2", ("v",), None)
    (onward,) = sent([send])
    assert isinstance(onward, Segment)
    assert (onward.ids, onward.task, onward.route) == ((), "t2", (Hop("t3"),))


def test_a_pass_completes_its_task_even_when_nothing_is_left_to_send() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}, task="mine"))
    stage.poll()
    stage.receive(Prune(RUN, 2, (2,), 9, ()))
    assert stage.done(()) == [Complete(RUN, ("mine",))]


def test_duplicates_are_ignored_and_a_hole_is_a_fault() -> None:
    stage = Stage().prefilled()
    first = stage.envelope(segment(1, {2: 1}))
    stage.feed(first, first)
    assert len(stage.work().parts[0].ids) == 1
    stage.done(())
    assert not stage.machine.runnable
    stage.envelope(segment(2, {3: 2}))  # lost on the way
    (fault,) = sent(stage.feed(stage.envelope(segment(3, {4: 3}))))
    assert isinstance(fault, Fault)
    assert "a message was lost" in fault.reason
    assert stage.receive(segment(4, {5: 4})) == []
    assert not stage.machine.runnable, "a failed job computes nothing more"


def test_a_prune_is_idempotent_and_one_for_unknown_rows_is_a_fault() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2}))
    stage.poll()
    stage.done(())
    prune = Prune(RUN, 2, (2,), 3, (3,))
    assert stage.receive(prune) == []
    assert stage.receive(prune) == []
    (fault,) = sent(stage.receive(Prune(RUN, 3, (3, 8), 9, ())))
    assert isinstance(fault, Fault)
    assert "lacks rows" in fault.reason


def test_a_prune_beyond_the_stages_offset_is_a_fault_even_if_its_rows_are_held() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2}))
    stage.poll()
    stage.done(())
    (fault,) = sent(stage.receive(Prune(RUN, 3, (3,), 4, ())))
    assert isinstance(fault, Fault)
    assert "lacks rows before position 4" in fault.reason


def test_the_retained_set_is_a_check() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2, 4: 3, 5: 3}))
    stage.poll()
    stage.done(())
    (fault,) = sent(stage.receive(Prune(RUN, 2, (2,), 3, (3, 5))))
    assert isinstance(fault, Fault)
    assert "keeps rows" in fault.reason


def test_a_segment_that_overtook_a_prune_is_not_checked_against_it() -> None:
    """Its ids are higher than all that the prune covers."""
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1, 3: 2}))
    stage.poll()
    stage.done(())
    stage.receive(segment(2, {4: 3}))
    stage.poll()
    stage.done(())
    assert sent(stage.receive(Prune(RUN, 2, (2,), 3, (3,)))) == []


def test_messages_that_overtake_the_open_are_kept_for_it() -> None:
    stage = Stage(2, 2)
    early = stage.envelope(PREFILL, sender=S1)
    assert stage.feed(early) == []
    assert not stage.machine.runnable
    stage.receive(OPEN)
    assert stage.machine.runnable


def test_of_too_many_early_messages_the_oldest_runs_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages of a run that is never opened must not crowd out those of later runs."""
    monkeypatch.setattr("flowspec.core.stage.early.EARLY_MESSAGES", 2)
    stage = Stage(2, 2)
    for job in ("lost", "also lost"):
        key = RunKey(job, 1)
        stage.receive(Segment(key, 0, 0, (0, 1), (-1, 0), (0, 1), (7, 8)), sender=S1)
    stage.receive(PREFILL, sender=S1)
    stage.receive(OPEN)
    assert stage.machine.runnable
    assert stage.receive(Open(RunKey("lost", 1), 2, 64, Sampling())) != []
    assert stage.work().parts[0].run == RUN
    assert stage.done((9,)) != []
    assert not stage.machine.runnable, "the oldest run's message is gone"


def test_a_run_that_has_ended_leaves_its_room_for_early_messages_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowspec.core.stage.early.EARLY_MESSAGES", 2)
    stage = Stage(2, 2)
    stage.receive(PREFILL, sender=S1)
    for job in ("revoked", "other"):
        key = RunKey(job, 1)
        stage.receive(Segment(key, 0, 0, (0, 1), (-1, 0), (0, 1), (7, 8)), sender=S1)
        stage.feed(Envelope(SCHEDULER, 0, Revoke(RunKey("revoked", 2))))
    stage.receive(OPEN)
    assert stage.machine.runnable, "its message was not dropped"


def test_a_message_of_an_unknown_run_is_not_computed() -> None:
    stage = Stage().prefilled()
    old = Segment(RunKey("j", 0), 5, 1, (2,), (1,), (2,), (2,))
    assert stage.feed(Envelope(DRAFT, 99, old)) == []
    assert not stage.machine.runnable
    assert stage.machine.open_runs == (RUN,)


@pytest.mark.parametrize("message", [OPEN, PREFILL, Prune(RUN, 1, (1,), 2, ()), Close(RUN)])
def test_a_run_older_than_the_one_that_is_open_is_over(message: Message) -> None:
    second = RunKey("j", 2)
    stage = Stage()
    stage.receive(OPEN, PREFILL)
    opened = stage.receive(Open(second, 2, 64, Sampling()))
    assert opened == [Release(RUN), Allocate(second, 64, Sampling(), Returns())]
    assert stage.receive(message) == []
    assert not stage.machine.runnable
    assert stage.machine.open_runs == (second,)


def test_what_overtakes_the_open_of_a_newer_run_is_kept_while_the_older_one_works() -> None:
    second = RunKey("j", 2)
    stage = Stage(2, 2)
    stage.receive(OPEN, PREFILL)
    early = Segment(second, 0, 0, (0, 1), (-1, 0), (0, 1), (7, 8))
    assert stage.receive(early, sender=S1) == []
    assert stage.work().parts[0].run == RUN
    stage.receive(Open(second, 2, 64, Sampling()))
    assert stage.done((9,)) == [], "a pass of a run that is over has no answer"
    assert stage.work().parts[0].run == second


def test_revoke_frees_the_job_and_late_messages_do_not_bring_it_back() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}))
    assert stage.feed(Envelope(SCHEDULER, 1, Revoke(RunKey("j", 2)))) == [Release(RUN)]
    assert not stage.machine.runnable
    assert stage.receive(segment(2, {3: 2})) == []
    assert stage.receive(OPEN) == []
    assert stage.machine.open_runs == ()


def test_a_revocation_leaves_other_jobs_alone() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}))
    assert stage.feed(Envelope(SCHEDULER, 1, Revoke(RunKey("k", 2)))) == []
    assert stage.machine.open_runs == (RUN,)
    assert stage.work().parts[0].run == RUN


def test_an_executor_that_fails_ends_the_job_not_the_stage() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}))
    stage.poll()
    (fault,) = sent(stage.machine.step(Done(WorkFailed("out of memory")), 1.0))
    assert isinstance(fault, Fault)
    assert fault.reason == "stage 1 could not compute: out of memory"
    stage.feed(Envelope(DRAFT, 1, Open(RunKey("k", 1), 2, 64, Sampling())))
    assert stage.machine.open_runs == (RUN, RunKey("k", 1))


def test_a_job_never_holds_more_rows_than_it_was_given() -> None:
    stage = Stage()
    stage.receive(Open(RUN, 2, 1, Sampling()), PREFILL)
    (fault,) = sent(stage.poll())
    assert isinstance(fault, Fault)
    assert "room for 1 rows, not 2" in fault.reason


OTHER = RunKey("k", 1)


def rows_for(run: RunKey, number: int, *ids: int) -> Segment:
    """A segment of ``run`` with a chain of prompt rows."""
    before = tuple(node - 1 for node in ids)
    return Segment(run, number, 0, ids, before, ids, ids)


def two_runs(stage: int = 1, *more: Segment) -> Stage:
    """A stage of two with prompts of three rows in two segments of each of two runs."""
    found = Stage(stage, 2)
    found.receive(Open(RUN, 3, 64, Sampling()), Open(OTHER, 3, 64, Sampling()))
    segments = [rows_for(run, 0, 0, 1) for run in (RUN, OTHER)]
    found.receive(*segments, *(rows_for(run, 1, 2) for run in (RUN, OTHER)), *more)
    return found


def passes_of(stage: Stage) -> list[list[tuple[RunKey, int]]]:
    """The segments of every pass until nothing waits."""
    passes = []
    while stage.machine.runnable:
        parts = stage.work().parts
        passes.append([(part.run, part.segment) for part in parts])
        stage.done(*((9,) * len(part.answers) for part in parts))
    return passes


def test_a_pass_has_the_first_waiting_segment_of_every_run() -> None:
    assert passes_of(two_runs()) == [[(RUN, 0), (OTHER, 0)], [(RUN, 1), (OTHER, 1)]]


def test_a_run_has_one_segment_in_a_pass() -> None:
    stage = Stage()
    stage.receive(OPEN, rows_for(RUN, 0, 0, 1), segment(1, {2: 1}))
    assert passes_of(stage) == [[(RUN, 0)], [(RUN, 1)]]


@pytest.mark.parametrize(
    ("most", "passes"),
    [
        (4, [[(RUN, 0), (OTHER, 0)], [(RUN, 1), (OTHER, 1)]]),
        (3, [[(RUN, 0)], [(RUN, 1), (OTHER, 0)], [(OTHER, 1)]]),
        (1, [[(RUN, 0)], [(RUN, 1)], [(OTHER, 0)], [(OTHER, 1)]]),
    ],
)
def test_rows_bound_a_pass_over_several_runs(
    monkeypatch: pytest.MonkeyPatch, most: int, passes: list[list[tuple[RunKey, int]]]
) -> None:
    monkeypatch.setattr("flowspec.core.stage.next_pass.MOST_ROWS", most)
    assert passes_of(two_runs()) == passes


def test_every_run_of_a_pass_gets_its_own_rows_and_choices() -> None:
    stage = two_runs(2)
    stage.poll()
    stage.done((), ())
    stage.poll()
    outputs = stage.done((7,), (8,), seconds=3.0)
    first, second = (Answer(run, 1, (2,), (token,), (), 3.0, 2) for run, token in RESULTS)
    assert sent(outputs) == [first, second]
    stage = two_runs(1)
    stage.poll()
    outputs = stage.done((), (), seconds=3.0)
    assert [output.rows for output in outputs if isinstance(output, Send)] == [
        PassRows(0, (0, 1)),
        PassRows(1, (0, 1)),
    ]
    slowest = [(message.seconds, message.rows) for message in sent(outputs)]  # type: ignore[union-attr]
    assert slowest == [(3.0, 4)] * 2


RESULTS = ((RUN, 7), (OTHER, 8))


def test_a_slower_pass_of_an_earlier_stage_is_the_one_that_is_told() -> None:
    stage = Stage()
    stage.receive(OPEN, replace(PREFILL, seconds=5.0, rows=30))
    stage.poll()
    (onward,) = sent(stage.done((), seconds=3.0))
    assert isinstance(onward, Segment)
    assert (onward.seconds, onward.rows) == (5.0, 30)


def test_of_several_runs_one_may_fail_alone() -> None:
    stage = two_runs()
    stage.poll()
    choices = (WorkFailed("its rows are lost"), Choice())
    fault, onward = sent(stage.machine.step(Done(PassDone(choices)), 1.0))
    assert fault == Fault(RUN, "stage 1 could not compute: its rows are lost")
    assert isinstance(onward, Segment)
    assert onward.run == OTHER


def test_a_pass_that_fails_as_a_whole_fails_all_its_runs() -> None:
    stage = two_runs()
    stage.poll()
    faults = sent(stage.machine.step(Done(WorkFailed("out of memory")), 1.0))
    assert [(type(fault), fault.run) for fault in faults] == [(Fault, RUN), (Fault, OTHER)]


def test_a_run_that_ends_during_a_shared_pass_leaves_the_other_its_rows() -> None:
    stage = two_runs()
    stage.poll()
    stage.feed(Envelope(SCHEDULER, 1, Revoke(RunKey("j", 2))))
    (send,) = stage.done((), ())
    assert isinstance(send, Send)
    assert (send.envelope.message.run, send.rows) == (OTHER, PassRows(1, (0, 1)))


def test_two_jobs_keep_their_segments_in_order_when_one_of_them_fails() -> None:
    stage = Stage()
    other = RunKey("k", 1)
    stage.receive(OPEN, PREFILL, Open(other, 1, 64, Sampling()))
    stage.receive(Prune(RUN, 1, (1,), 2, ()))  # never computed: the job fails, the other does not
    stage.receive(
        Segment(other, 0, 0, (0,), (-1,), (0,), (5,)),
        Segment(other, 1, 0, (1,), (0,), (1,), (5,)),
    )
    assert stage.poll() == [Discard(RUN, 0)]
    (compute,) = stage.poll()
    assert isinstance(compute, Compute)
    stage.done(())
    assert passes_of(stage) == [[(other, 1)]]


def test_a_refused_write_fails_the_job_or_ends_it_here() -> None:
    stage = Stage().prefilled()
    stage.receive(segment(1, {2: 1}))
    (fault,) = sent(stage.machine.step(Refused(RUN, False, "the log of s2 is full"), 0.0))
    assert fault == Fault(RUN, "the log of s2 is full")
    assert stage.machine.step(Refused(RUN, False, "again"), 0.0) == []
    stage = Stage().prefilled()
    assert stage.machine.step(Refused(RunKey("j", 0), True, ""), 0.0) == []
    assert stage.machine.step(Refused(RUN, True, ""), 0.0) == [Release(RUN)]


def test_a_run_that_goes_on_shares_its_prompts_rows() -> None:
    stage = Stage().prefilled()
    assert stage.receive(Retain(RUN, 1, (RUN,))) == [Keep(RUN, (Kept(1),))]
    assert stage.receive(segment(1, {2: 1})) == []
    assert stage.work().parts[0].pruned == Pruned((1,), ()), "which keeping has not applied"
    stage.done((9,))
    refused = Refused(RUN, False, "no room", is_keep=True)
    assert stage.machine.step(refused, 0.0) == [Evict(RUN)]
    assert stage.machine.step(refused, 0.0) == []
    assert RUN in stage.machine.open_runs, "it goes on"
    other = RunKey("other", 1)
    stage.receive(Open(other, 2, 64, Sampling(), prefix=Prefix(RUN, 1)))
    (fault,) = sent(stage.receive(Retain(RUN, 2, (RUN,))))
    assert fault == Fault(RUN, "stage 1 is to keep 2 rows of a run that goes on")


def test_shared_rows_outlast_a_run_that_is_revoked() -> None:
    stage = Stage().prefilled()
    stage.receive(Retain(RUN, 1, (RUN,)))
    assert stage.receive(Revoke(RunKey("j", 2))) == [Release(RUN)]
    other = RunKey("other", 1)
    (allocation,) = stage.receive(Open(other, 2, 64, Sampling(), prefix=Prefix(RUN, 1)))
    assert isinstance(allocation, Allocate)
    assert (allocation.source, allocation.held) == (RUN, (1,))
    third = RunKey("third", 1)
    assert stage.receive(Open(third, 2, 64, Sampling()), Retain(third, 1, (third,))) == [
        Allocate(third, 64, Sampling(), Returns()),
        Evict(RUN),
    ], "nothing is computed that could be kept"


def test_what_a_stage_does_not_take_is_a_fault_or_our_bug() -> None:
    stage = Stage().prefilled()
    (fault,) = sent(stage.receive(Answer(RUN, 0, (), ())))
    assert isinstance(fault, Fault)
    with pytest.raises(StateError):
        stage.machine.step(Tick(), 0.0)
    assert Stage().receive(Submit(RUN, ())) == []


# ---- holders -------------------------------------------------------------------------------------


def test_a_stage_ignores_a_run_of_another_holder() -> None:
    """One that was paused reads what is for its successor: it has no rows, and must not say so."""
    stage = StageMachine(1, 2, generation=3)
    early = Envelope(DRAFT, 2, PREFILL)
    assert list(stage.step(Received((early,)), 0.0)) == []
    opened = Envelope(DRAFT, 1, replace(OPEN, generations=(1, 4, 1)))
    assert list(stage.step(Received((opened,)), 0.0)) == [Release(RUN)]
    later = [Envelope(DRAFT, seq, message) for seq, message in enumerate([PREFILL, Close(RUN)], 5)]
    assert list(stage.step(Received(tuple(later)), 0.0)) == []
    assert not stage.runnable
    assert stage.open_runs == ()


@pytest.mark.parametrize(
    ("stage", "middle", "generations", "serves"),
    [
        (1, 0, (9, 3, 9), True),
        (2, 0, (9, 9, 3), True),
        (1, 1, (9, 9, 9, 3), True),
        (1, 2, (9, 9, 9, 9, 3), True),
        (1, 0, (3, 9, 3), False),
        (2, 0, (9, 3), False),
        (1, 0, (), False),
    ],
)
def test_a_stage_serves_the_runs_that_name_its_generation(
    stage: int, middle: int, generations: tuple[int, ...], serves: bool
) -> None:
    machine = StageMachine(stage, 2, middle=middle, generation=3)
    opened = replace(OPEN, generations=generations)
    assert machine.serves(opened) == serves
    machine.step(Received((Envelope(DRAFT, 1, opened),)), 0.0)
    assert machine.open_runs == ((RUN,) if serves else ())


def test_a_run_of_another_holder_ends_the_runs_before_it() -> None:
    stage = StageMachine(1, 2, generation=3)
    opened = replace(OPEN, generations=(1, 3, 1))
    stage.step(Received((Envelope(DRAFT, 1, opened),)), 0.0)
    second = RunKey(RUN.job, RUN.epoch + 1)
    newer = replace(OPEN, run=second, generations=(1, 4, 1))
    outputs = stage.step(Received((Envelope(DRAFT, 1, newer),)), 0.0)
    assert list(outputs) == [Release(RUN), Release(second)]


def test_a_segment_goes_on_with_all_that_a_stage_does_not_change() -> None:
    route = (Hop("t2"), Hop("t3"))
    whole = Segment(RUN, 4, 5, (6, 7), (1, 6), (2, 3), (8, 9), True, "t1", route, 0.1, 2, 32)
    sent = onward(whole, (1,), Slowest(0.5, 3))
    assert sent == replace(
        whole,
        ids=(7,),
        parents=(6,),
        positions=(3,),
        tokens=(),
        task="t2",
        route=(Hop("t3"),),
        seconds=0.5,
        rows=3,
    )
    fresh = Segment(RUN, 0, 0, (), (), ())
    named = {field.name for field in fields(Segment)} - {"run", "segment", "round"}
    assert all(getattr(whole, name) != getattr(fresh, name) for name in named)
