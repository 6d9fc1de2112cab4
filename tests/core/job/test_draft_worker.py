"""The draft worker's machine: the start, failure and end of jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.job.draft_run import REPORT_SECONDS
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol import work
from flowspec.core.protocol.addresses import GRAPH, SCHEDULER, Address
from flowspec.core.protocol.machine import (
    Allocate,
    Commit,
    Compute,
    Done,
    Finish,
    Learn,
    OpenJob,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    ScoredCommit,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import (
    Answer,
    Close,
    Earlier,
    Envelope,
    Fault,
    Message,
    Meter,
    Open,
    Revoke,
    Segment,
    StageReport,
    Submit,
    Synced,
)
from flowspec.core.protocol.work import (
    DraftDone,
    Encode,
    EncodeDone,
    EncodeFailed,
    EncodeTurns,
    WorkFailed,
)
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import TREE_ROWS
from flowspec.core.run.turns import Turn, turns_text
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.errors import ProtocolError
from flowspec.strategies import build
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.strategy import Auto
from tests.addresses import S1, S2
from tests.toy import limits

RUN = RunKey("j", 1)


class Draft:
    """A machine and the sequence numbers of its senders."""

    def __init__(self, stages: int = 1, history: History | None = None) -> None:
        self.machine = DraftMachine(limits(stages), build, history)
        self.seqs: dict[tuple[RunKey, Address], int] = {}

    def receive(self, message: Message, sender: Address = S1, now: float = 0.0) -> list[Output]:
        key = (message.run, sender)
        self.seqs[key] = self.seqs.get(key, 0) + 1
        return list(self.machine.step(Received((Envelope(sender, self.seqs[key], message),)), now))

    def submit(self, job: str = "j", epoch: int = 1, **fields: str) -> list[Output]:
        return self.receive(Submit(RunKey(job, epoch), tuple(fields.items())), SCHEDULER)

    def poll(self) -> list[Output]:
        return list(self.machine.step(Poll(), 0.0))


def one(outputs: Sequence[Output], kind: type) -> object:
    (found,) = [output for output in outputs if isinstance(output, kind)]
    return found


def messages(outputs: Sequence[Output]) -> list[Message]:
    return [output.envelope.message for output in outputs if isinstance(output, Send)]


def test_a_job_opens_the_stages_and_streams_its_prompt_in_chunks() -> None:
    draft = Draft(stages=2)
    outputs = draft.submit(
        prompt_ids=str(list(range(2, 62)) * 2), strategy="autoregressive", max_new_tokens="8"
    )
    accepted = one(outputs, OpenJob)
    assert isinstance(accepted, OpenJob)
    assert len(accepted.prompt_ids) == 120
    opened = [message for message in messages(outputs) if isinstance(message, Open)]
    assert [message.capacity for message in opened] == [120 + 8 + TREE_ROWS] * 2
    chunks = [message for message in messages(outputs) if isinstance(message, Segment)]
    assert [len(chunk.ids) for chunk in chunks] == [60, 60]
    assert chunks[1].parents[0] == 59


def test_text_is_encoded_first() -> None:
    draft = Draft()
    assert draft.submit(prompt="hello", strategy="autoregressive") == []
    (run,) = draft.machine.step(Poll(), 0.0)
    assert run == Compute(Encode(RUN, "hello", raw=False))
    outputs = draft.machine.step(Done(EncodeDone((5, 6))), 0.0)
    assert isinstance(one(outputs, Allocate), Allocate)


@pytest.mark.parametrize(("refused", "cause"), [(True, "refused"), (False, "failed")])
def test_a_text_that_cannot_be_encoded_is_refused_unless_the_encoder_failed(
    refused: bool, cause: str
) -> None:
    draft = Draft()
    draft.submit(prompt="hello", strategy="autoregressive")
    draft.poll()
    finish = one(draft.machine.step(Done(EncodeFailed("why", refused)), 0.0), Finish)
    assert finish == Finish(RUN, "error", "why", {}, cause)


WAITING = {"prompt_ids": "[5, 6]", "strategy": "pipedec"}


def test_a_job_that_waits_behind_a_barrier_ends_when_its_time_is_over() -> None:
    draft = Draft()
    draft.submit("a", prompt_ids="[5, 6]", strategy="autoregressive")
    late = Submit(RunKey("b", 1), tuple((WAITING | {"wait_seconds": "2"}).items()), 0.5)
    assert draft.receive(late, SCHEDULER, now=1.0) == []
    assert draft.machine.deadline == 1.0 + 2 - 0.5
    assert draft.machine.step(Tick(), 2.4) == []
    finish = one(draft.machine.step(Tick(), 2.5), Finish)
    assert finish == Finish(
        late.run, "error", "the job did not begin within its wait_seconds", {}, "late"
    )


def test_a_job_that_had_begun_waits_for_its_next_run_as_long_as_it_takes() -> None:
    draft = Draft()
    draft.submit("a", prompt_ids="[5, 6]", strategy="autoregressive")
    fields = tuple((WAITING | {"wait_seconds": "2"}).items())
    draft.receive(Submit(RunKey("b", 2), fields, 0.5, (), Earlier((5, 6))), SCHEDULER)
    assert draft.machine.step(Tick(), 2.5) == []


def test_of_the_jobs_that_wait_the_highest_priority_begins_first() -> None:
    draft = Draft()
    draft.submit("a", **WAITING)
    for job, priority in (("b", "0"), ("c", "7"), ("d", "7")):
        assert draft.submit(job, **WAITING, priority=priority) == []
    begun = []
    for job in "acd":
        draft.receive(Revoke(RunKey(job, 2)), SCHEDULER)
        opened = one(draft.poll(), OpenJob)
        assert isinstance(opened, OpenJob)
        begun.append(opened.run.job)
    assert begun == ["c", "d", "b"]


def test_a_conversation_is_encoded_by_the_template() -> None:
    draft = Draft()
    turns = (Turn("user", "hello"), Turn("assistant", "hi"), Turn("user", "why?"))
    assert draft.submit(messages=turns_text(turns), strategy="autoregressive") == []
    (run,) = draft.machine.step(Poll(), 0.0)
    assert run == Compute(EncodeTurns(RUN, turns))
    outputs = draft.machine.step(Done(EncodeDone((5, 6))), 0.0)
    assert isinstance(one(outputs, Allocate), Allocate)


@pytest.mark.parametrize("fields", [{"prompt": "hello"}, {"prompt_ids": "[5, 6]"}])
def test_a_job_that_asks_for_ids_alone_ends_with_them(fields: dict[str, str]) -> None:
    draft = Draft()
    outputs = draft.submit(tokenize="1", **fields)
    if "prompt" in fields:
        draft.machine.step(Poll(), 0.0)
        outputs = list(draft.machine.step(Done(EncodeDone((5, 6))), 0.0))
    opened, finish = outputs
    assert opened == OpenJob(RUN, (5, 6), "auto")
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error, finish.stats["tokens"]) == ("length", "", 0)
    assert not draft.machine.sessions
    assert draft.poll() == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"prompt_ids": "[2]", "strategy": "fastest"},
            "unknown strategy 'fastest'; there are: autoregressive",
        ),
        ({"prompt_ids": "[2]", "strategy": "flowspec:merg=on"}, "unknown strategy option 'merg'"),
        ({"prompt_ids": "[2]", "strategy": "flowspec:width=0"}, "width is 0; expected 1 to 64"),
        ({"prompt_ids": "[2]", "max_new_tokens": "0"}, "max_new_tokens is 0"),
        ({"prompt_ids": "[64]"}, "vocabulary ends at 63"),
        ({"prompt_ids": str([2] * 512)}, "the prompt has 512 tokens; the model's context is 512"),
    ],
)
def test_a_job_that_cannot_be_served_ends_at_once_with_one_line(
    fields: dict[str, str], says: str
) -> None:
    finish = one(Draft().submit(**fields), Finish)
    assert isinstance(finish, Finish)
    assert finish.reason == "error"
    assert says in finish.error
    assert "\n" not in finish.error


def test_a_prompt_the_tokenizer_makes_nothing_of_is_refused() -> None:
    draft = Draft()
    draft.submit(prompt="?")
    draft.machine.step(Poll(), 0.0)
    finish = one(draft.machine.step(Done(EncodeDone(())), 0.0), Finish)
    assert isinstance(finish, Finish)
    assert "no tokens" in finish.error


def test_a_failing_tokenizer_ends_the_job() -> None:
    draft = Draft()
    draft.submit(prompt="?")
    draft.machine.step(Poll(), 0.0)
    finish = one(draft.machine.step(Done(EncodeFailed("no template")), 0.0), Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "no template"


def test_a_prompt_is_encoded_beside_the_passes_of_other_runs() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[5, 6]", strategy="flowspec")
    draft.receive(Answer(RUN, 0, (1,), (7,)))
    later = RunKey("later", 1)
    fields = (("prompt", "a long text"), ("strategy", "autoregressive"))
    draft.receive(Submit(later, fields))
    assert draft.poll() == [Compute(Encode(later, "a long text", raw=False))]
    assert draft.machine.runnable
    (drafts,) = draft.poll()
    assert isinstance(drafts, Compute)
    assert not draft.machine.runnable
    begun = draft.machine.step(Done(EncodeDone((8, 9))), 1.0)
    assert one(begun, Allocate).run == later
    draft.machine.step(drafted(*drafts.work.drafts), 1.0)
    assert draft.machine.runnable


def finished(draft: Draft) -> list[Output]:
    """Drive an autoregressive job of one token to its last commit."""
    draft.submit(prompt_ids="[2, 3]", strategy="autoregressive", max_new_tokens="1")
    return draft.receive(Answer(RUN, 0, (1,), (40,)), now=3.0)


def test_the_last_commit_closes_the_stages_and_the_reports_finish_the_job() -> None:
    draft = Draft()
    outputs = finished(draft)
    commit = one(outputs, Commit)
    assert isinstance(commit, Commit)
    assert (commit.tokens, commit.finish, commit.offset, commit.advance) == ((40,), "length", 1, 1)
    assert messages(outputs) == [Close(RUN)]
    finish = one(draft.receive(StageReport(RUN, 1, Meter(useful=1)), now=3.1), Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error, finish.stats["tokens"]) == ("length", "", 1)
    assert finish.stats["rows"] == {"useful": 1, "wasted": 0, "void": 0}


def test_a_missing_report_does_not_hold_the_job_for_ever() -> None:
    draft = Draft()
    finished(draft)
    assert draft.machine.deadline == 3.0 + REPORT_SECONDS
    finish = one(draft.machine.step(Tick(), 3.0 + REPORT_SECONDS), Finish)
    assert isinstance(finish, Finish)
    assert finish.reason == "length"
    assert finish.stats["rows"] == {"useful": None, "wasted": None, "void": None}


def test_a_job_without_answers_fails_instead_of_hanging() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    due = draft.machine.deadline
    assert due == limits(1).stall_seconds
    assert draft.machine.step(Tick(), due - 1) == []
    finish = one(draft.machine.step(Tick(), due), Finish)
    assert isinstance(finish, Finish)
    assert "no answer from the pipeline for 120 s" in finish.error


def test_a_fault_ends_the_job_with_its_reason_and_closes_the_stages() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    outputs = draft.receive(Fault(RUN, "stage 1 failed"))
    finish = one(outputs, Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "stage 1 failed"
    assert messages(outputs) == [Close(RUN)]
    assert draft.machine.sessions == {}


def test_a_gap_in_what_the_last_stage_sends_ends_the_job() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    draft.seqs[RUN, S1] = 4
    finish = one(draft.receive(Answer(RUN, 0, (0,), (40,))), Finish)
    assert isinstance(finish, Finish)
    assert "a message was lost" in finish.error


def test_a_revoked_job_is_dropped_and_nothing_is_sent() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    draft.submit("k", prompt="text")
    assert draft.receive(Revoke(RunKey("j", 2)), SCHEDULER) == [Release(RUN)]
    assert draft.receive(Revoke(RunKey("k", 2)), SCHEDULER) == [Release(RunKey("k", 1))], (
        "else its entries are counted for ever"
    )
    assert draft.receive(Answer(RUN, 0, (0,), (40,))) == []
    assert not draft.machine.runnable


def test_a_refused_write_fails_the_job_or_ends_it_here() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    finish = one(draft.machine.step(Refused(RUN, False, "the log of s1 is full"), 0.0), Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "the log of s1 is full"
    second = RunKey("j", 2)
    draft.submit(epoch=2, prompt_ids="[2]", strategy="autoregressive")
    assert draft.machine.step(Refused(second, True, ""), 0.0) == [Release(second)]
    assert draft.machine.step(Refused(second, True, ""), 0.0) == []


def test_a_second_submit_of_a_running_job_changes_nothing() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    assert draft.submit(prompt_ids="[2]", strategy="autoregressive") == []


def test_a_run_that_has_ended_is_not_started_again() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    draft.receive(Fault(RUN, "stage 1 failed"))
    assert draft.submit(prompt_ids="[2]", strategy="autoregressive") == []
    assert draft.machine.sessions == {}


@pytest.mark.parametrize("fields", [{"prompt_ids": "[2]"}, {"prompt": "text"}])
def test_a_jobs_newer_run_takes_the_place_of_the_older_one(fields: dict[str, str]) -> None:
    draft = Draft()
    draft.submit(strategy="autoregressive", **fields)
    outputs = draft.submit(epoch=2, prompt_ids="[3]", strategy="autoregressive")
    assert outputs[0] == Release(RUN)
    assert one(outputs, OpenJob) == OpenJob(RunKey("j", 2), (3,), "autoregressive")
    assert set(draft.machine.sessions) == {RunKey("j", 2)}
    assert draft.submit(strategy="autoregressive", **fields) == [], "a late Submit of the old run"


def test_other_jobs_and_the_same_run_stay_where_a_newer_run_comes_or_one_is_revoked() -> None:
    draft = Draft()
    draft.submit("k", prompt_ids="[2]", strategy="autoregressive")
    draft.submit(epoch=3, prompt_ids="[2]", strategy="autoregressive")
    assert draft.receive(Revoke(RunKey("j", 3)), SCHEDULER) == [], "runs before it, not it"
    assert set(draft.machine.sessions) == {RunKey("j", 3), RunKey("k", 1)}


def test_a_revoked_run_is_not_started_by_its_late_submit() -> None:
    draft = Draft()
    assert draft.receive(Revoke(RunKey("j", 2)), SCHEDULER) == []
    assert draft.submit(prompt_ids="[2]", strategy="autoregressive") == []


@pytest.mark.parametrize("late", ["fault", "gap", "stray answer", "refused write"])
def test_once_the_text_is_complete_nothing_makes_the_job_an_error(late: str) -> None:
    draft = Draft()
    finished(draft)
    if late == "gap":
        draft.seqs[RUN, S1] += 3
    outputs: list[Output] = []
    if late == "fault":
        outputs = draft.receive(Fault(RUN, "stage 1 failed"))
    elif late == "refused write":
        outputs = list(draft.machine.step(Refused(RUN, False, "the log of s1 is full"), 3.0))
    else:
        outputs = draft.receive(Answer(RUN, 9, (1,), (1 << 62,)))
    assert outputs == []
    finish = one(draft.machine.step(Tick(), 3.0 + REPORT_SECONDS), Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error, finish.stats["tokens"]) == ("length", "", 1)


def test_a_refused_last_commit_makes_the_job_an_error() -> None:
    """The text is complete, but its last tokens are not in the output."""
    draft = Draft()
    finished(draft)
    refused = Refused(RUN, False, "the output is full", is_commit=True)
    outputs = list(draft.machine.step(refused, 3.0))
    assert [type(output) for output in outputs] == [Finish, Release]
    finish = one(outputs, Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error) == ("error", "the output is full")
    assert draft.machine.deadline is None


def drafting(outputs: Sequence[Output]) -> list[work.Draft]:
    """The drafts of the pass that ``outputs`` start."""
    (compute,) = outputs
    assert isinstance(compute, Compute)
    assert isinstance(compute.work, work.DraftPass)
    return [*compute.work.drafts]


def drafted(*drafts: work.Draft) -> Done:
    """The end of a pass with two proposals for every row that ``drafts`` ask about."""
    rows = [len(draft.part.answers) for draft in drafts]
    done = (DraftDone(((50, 51),) * count, ((-0.1, -0.2),) * count) for count in rows)
    return Done(work.DraftPassDone(tuple(done)))


def completed_while_drafting(draft: Draft) -> work.Draft:
    """Complete a job's text while the drafter works for it; the drafter's pass."""
    draft.submit(prompt_ids="[2, 3]", strategy="chain", max_new_tokens="2")
    draft.receive(Answer(RUN, 0, (1,), (40,)))
    (own,) = drafting(draft.poll())
    assert messages(draft.receive(Answer(RUN, 1, (2,), (41,)))) == [Close(RUN)]
    return own


def test_a_drafter_that_fails_once_the_text_is_complete_is_no_error() -> None:
    draft = Draft()
    completed_while_drafting(draft)
    assert draft.machine.step(Done(WorkFailed("out of memory")), 1.0) == []
    finish = one(draft.receive(StageReport(RUN, 1, Meter())), Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error) == ("length", "")


def test_a_drafters_result_changes_nothing_once_the_text_is_complete() -> None:
    draft = Draft()
    assert draft.machine.step(drafted(completed_while_drafting(draft)), 1.0) == []
    assert not draft.machine.runnable
    assert draft.receive(StageReport(RUN, 1, Meter())) != []


def test_the_drafter_learns_the_hidden_rows_of_an_answer_before_its_next_pass() -> None:
    draft = Draft()
    draft.machine = DraftMachine(replace(limits(1), hidden=True), build)
    draft.submit(prompt_ids="[2, 3]", strategy="chain")
    outputs = draft.receive(Answer(RUN, 0, (0, 1), (5, 40)))
    assert outputs[0] == Learn(RUN, 0, (0, 1))
    assert sum(isinstance(output, Learn) for output in outputs) == 1
    assert draft.machine.runnable


def waiting(*jobs: str, prompt: Sequence[int] = (2, 3)) -> Draft:
    """A machine with jobs that all wait for the drafter."""
    draft = Draft()
    for job in jobs:
        draft.submit(job, prompt_ids=str([*prompt]), strategy="chain:window=8")
        last = len(prompt) - 1
        draft.receive(Answer(RunKey(job, 1), 0, (last,), (40,)))
    return draft


def test_a_pass_of_the_drafter_is_for_all_jobs_that_wait() -> None:
    jobs = ("i", "j", "k")
    draft = waiting(*jobs)
    for _ in range(2):
        drafts = drafting(draft.poll())
        assert [each.part.run.job for each in drafts] == [*jobs]
        draft.machine.step(drafted(*drafts), 0.0)
    assert draft.machine.continuing


def test_rows_bound_a_pass_and_who_was_left_out_is_first_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowspec.core.job.draft_worker.MOST_ROWS", 12)
    draft = waiting(*"ijkl", prompt=(2, 3, 4, 5))
    served = []
    for _ in range(2):
        drafts = drafting(draft.poll())
        assert sum(each.rows for each in drafts) <= 12
        served.append([each.part.run.job for each in drafts])
        draft.machine.step(drafted(*drafts), 0.0)
    first, second = served
    assert first == ["i", "j"]
    assert second[:2] == ["k", "l"]
    monkeypatch.setattr("flowspec.core.job.draft_worker.MOST_ROWS", 0)
    assert len(drafting(draft.poll())) == 1, "one that is too long has a pass to itself"


def test_of_several_jobs_one_may_fail_alone() -> None:
    draft = waiting("i", "j")
    own, other = drafting(draft.poll())
    (done,) = drafted(other).result.results  # type: ignore[union-attr]
    results = (WorkFailed("its rows are lost"), done)
    outputs = list(draft.machine.step(Done(work.DraftPassDone(results)), 1.0))
    finish = one(outputs, Finish)
    assert isinstance(finish, Finish)
    assert finish.run == own.part.run
    assert finish.error == "the draft model could not compute: its rows are lost"
    assert [each.part.run for each in drafting(draft.poll())] == [other.part.run]


def test_a_pass_that_fails_as_a_whole_fails_all_its_jobs() -> None:
    draft = waiting("i", "j")
    drafting(draft.poll())
    outputs = draft.machine.step(Done(WorkFailed("out of memory")), 1.0)
    ended = [output.run.job for output in outputs if isinstance(output, Finish)]
    assert ended == ["i", "j"]


def test_a_job_that_ends_during_a_shared_pass_leaves_the_others_their_proposals() -> None:
    draft = waiting("i", "j")
    drafts = drafting(draft.poll())
    draft.receive(Revoke(RunKey("i", 2)), SCHEDULER)
    assert list(draft.machine.step(drafted(*drafts), 1.0)) == []
    assert [each.part.run.job for each in drafting(draft.poll())] == ["j"]


def test_a_refused_write_that_says_the_run_is_over_ends_a_complete_one_too() -> None:
    draft = Draft()
    finished(draft)
    assert draft.machine.step(Refused(RUN, True, ""), 3.0) == [Release(RUN)]
    assert draft.machine.deadline is None


def test_the_time_to_the_first_token_begins_with_the_submission() -> None:
    draft = Draft()
    fields = {"prompt_ids": "[2, 3]", "strategy": "autoregressive", "max_new_tokens": "1"}
    draft.receive(Submit(RUN, tuple(fields.items()), queued_seconds=5.0), SCHEDULER, now=1.0)
    draft.receive(Answer(RUN, 0, (1,), (40,)), now=4.0)
    finish = one(draft.receive(StageReport(RUN, 1, Meter()), now=4.0), Finish)
    assert isinstance(finish, Finish)
    assert finish.stats["queue_seconds"] == 5.0
    assert finish.stats["ttft_seconds"] == 8.0


@pytest.mark.parametrize("token", [-1, limits(1).vocabulary, 1 << 62])
def test_a_token_outside_the_vocabulary_ends_the_job(token: int) -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    finish = one(draft.receive(Answer(RUN, 0, (0,), (token,))), Finish)
    assert isinstance(finish, Finish)
    assert "outside the vocabulary" in finish.error


@pytest.mark.parametrize(
    "top",
    [(), (((40, -0.5),),), (((5, -0.5), (6, -1.0)),), (((40, 0.5), (5, -1.0)),)],
    ids=["none", "too few", "of other tokens", "above 0"],
)
def test_log_probabilities_that_are_not_those_asked_for_end_the_job(
    top: tuple[tuple[tuple[int, float], ...], ...],
) -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2, 3]", max_new_tokens="1", logprobs="2")
    finish = one(draft.receive(Answer(RUN, 0, (1,), (40,), top)), Finish)
    assert isinstance(finish, Finish)
    assert "log-probabilit" in finish.error


def test_log_probabilities_of_a_verdict_go_with_its_commit() -> None:
    draft = Draft()
    sent = messages(draft.submit(prompt_ids="[2, 3]", max_new_tokens="1", logprobs="0"))
    assert [message.returns.top for message in sent if isinstance(message, Open)] == [1]
    top = (((5, -0.5), (40, -1.5)),)
    commit = one(draft.receive(Answer(RUN, 0, (1,), (40,), top)), ScoredCommit)
    assert isinstance(commit, ScoredCommit)
    assert (commit.tokens, commit.alternatives, commit.top) == ((40,), 0, top)


def test_a_message_that_arrives_twice_is_taken_once() -> None:
    """A second join would begin a second timestep."""
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="pipedec")
    draft.receive(Answer(RUN, 0, (0,), (40,)))
    join = Received((Envelope(GRAPH, 1, Synced(RUN, "sync/1")),))
    assert Synced(RUN, "sync/2") in messages(draft.machine.step(join, 0.0))
    assert draft.machine.step(join, 0.0) == []


def test_the_wait_for_an_answer_grows_with_the_chunks_of_the_prompt() -> None:
    draft = Draft()
    draft.submit(prompt_ids=json.dumps([2] * 130), strategy="autoregressive")
    one_piece = Draft()
    one_piece.submit(prompt_ids="[2]", strategy="autoregressive")
    assert draft.machine.deadline is not None
    assert one_piece.machine.deadline is not None
    assert draft.machine.deadline == 3 * one_piece.machine.deadline


def answered(draft: Draft, job: str, **fields: str) -> Auto:
    """The strategy of a job on two stages whose prompt of 20 and two lone rows were answered."""
    draft.submit(job, prompt_ids=json.dumps([2] * 20), strategy="auto", **fields)
    if fields:
        draft.poll()  # a job that is recorded begins in a step of its own
    strategy = draft.machine.sessions[RunKey(job, 1)].strategy
    assert isinstance(strategy, Auto)
    draft.receive(Answer(RunKey(job, 1), 0, (19,), (40,), seconds=1.0), S2, now=1.0)
    draft.receive(Answer(RunKey(job, 1), 1, (20,), (41,), seconds=0.5), S2, now=2.0)
    root = draft.machine.sessions[RunKey(job, 1)].tree.root
    draft.receive(Answer(RunKey(job, 1), 2, (root,), (42,), seconds=0.5), S2, now=3.0)
    return strategy


def test_jobs_share_what_they_find_out() -> None:
    history = History()
    known = history.get(CostHistory)
    draft = Draft(2, history)
    answered(draft, "j")
    assert (known.passes.single, known.passes.widest) == (0.5, 20)
    assert known.rate > 0
    draft.submit("k", prompt_ids="[2]", strategy="auto")
    session = draft.machine.sessions[RunKey("k", 1)]
    assert isinstance(session.strategy, Auto)
    assert session.strategy.sizer.sizing(0, 0.0).rows == 40
    assert session.strategy.sizer.price(1) > 0


def test_a_job_that_is_recorded_starts_without_history_and_leaves_none() -> None:
    history = History()
    known = history.get(CostHistory)
    draft = Draft(2, history)
    recorded = answered(draft, "j", record="1")
    assert recorded.sizer.price(1) > 0, "it learns from its own passes"
    assert (known.passes.widest, known.rate) == (0, 0.0)
    answered(draft, "k")
    rate = known.rate
    draft.submit("l", prompt_ids="[2]", strategy="auto", record="1")
    draft.poll()
    session = draft.machine.sessions[RunKey("l", 1)]
    assert isinstance(session.strategy, Auto)
    assert session.strategy.sizer.sizing(0, 0.0).rows == 1
    assert session.strategy.sizer.price(1) == 0
    assert (known.passes.widest, known.rate) == (20, rate)


class _Rootless(Strategy):
    """A mistake in a new strategy: its first segment lacks the root."""

    draft_width = 2

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        tree = view.tree
        return PathGrowth(tree, tree.root, 1, lambda tree, nodes: [nodes])


class _Widthless(_Rootless):
    """A mistake in a new strategy: it grows the tree and drafts no candidates."""

    draft_width = 0


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (_Rootless, "the first segment of the strategy's growth lacks the root"),
        (_Widthless, "the strategy grows the tree, but its draft_width is 0"),
    ],
)
def test_a_mistake_in_a_strategy_ends_the_job_at_once_with_its_name(
    kind: type[Strategy], says: str
) -> None:
    """Not after the wait for an answer to a segment that was never sent."""
    draft = Draft()
    draft.machine = DraftMachine(limits(1), lambda spec, stages: kind())
    draft.submit(prompt_ids="[2]")
    outputs = draft.receive(Answer(RUN, 0, (0,), (40,)))
    for compute in [output for output in draft.poll() if isinstance(output, Compute)]:
        outputs = list(draft.machine.step(drafted(*drafting([compute])), 0.0))
    finish = one(outputs, Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.error) == ("error", says)


def test_a_draft_worker_ignores_a_run_of_another_holder() -> None:
    """One that was paused reads what is for its successor."""
    machine = DraftMachine(limits(1), build, generation=3)
    fields = (("prompt_ids", "[5, 6]"), ("strategy", "autoregressive"))
    for generations in ((4, 3), (), (2,)):
        submit = Submit(RUN, fields, 0.0, generations)
        assert list(machine.step(Received((Envelope(SCHEDULER, 1, submit),)), 0.0)) == []
        assert not machine.runnable
        assert machine.sessions == {}


def test_a_run_tells_its_stages_which_workers_it_is_assigned_to() -> None:
    machine = DraftMachine(limits(2, middles=1), build, generation=3)
    fields = (("prompt_ids", "[5, 6]"), ("strategy", "pipespec"))
    submit = Submit(RUN, fields, 0.0, (3, 1, 2, 7))
    outputs = machine.step(Received((Envelope(SCHEDULER, 1, submit),)), 0.0)
    opened = [message for message in messages(outputs) if isinstance(message, Open)]
    assert [message.generations for message in opened] == [(3, 1, 2, 7)] * 3


def test_tokens_of_a_middle_models_padding_are_read_as_another() -> None:
    """It may choose one that the target does not have; the job failed."""
    machine = DraftMachine(limits(2, middles=1), build)
    vocabulary = machine._limits.vocabulary
    answer = Answer(RUN, 1, (3, 4), (vocabulary + 2, 5))
    assert machine._of_middle(answer).tokens == (0, 5)
    with pytest.raises(ProtocolError, match="outside the vocabulary"):
        machine._check_tokens(answer)


def test_a_job_of_a_chain_computes_its_whole_prompt_and_leaves_its_rows() -> None:
    """At the stages: the chain's other models have no kept rows to begin with."""
    machine = DraftMachine(replace(limits(2, middles=1), kept_rows=1024), build)
    ids = tuple(3 + at % 50 for at in range(200))
    for number in (1, 2):
        key = RunKey(f"j{number}", 1)
        fields = (("prompt_ids", str(list(ids))), ("strategy", "pipespec"))
        submit = Submit(key, fields, 0.0)
        machine.step(Received((Envelope(SCHEDULER, number, submit),)), 0.0)
        session = machine.sessions[key]
        assert session.prompt_rows.reused == 0
        assert session.will_share(drafts=False)
        retained = session.prompt_rows.retain(0)
        assert retained is not None
        assert retained.keep == len(ids) - 1
        assert session.prompt_rows.close(ids, ()).keep == len(ids)
