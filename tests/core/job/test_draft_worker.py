"""The draft worker's machine: how jobs begin, fail and end."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from flowspec.core.job.draft_worker import REPORT_SECONDS, DraftMachine
from flowspec.core.protocol.machine import (
    Accepted,
    Allocate,
    Commit,
    Done,
    Encode,
    EncodeDone,
    Finish,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    Run,
    Send,
    Tick,
    WorkFailed,
)
from flowspec.core.protocol.messages import (
    Answer,
    Close,
    Envelope,
    Fault,
    Message,
    Meter,
    Open,
    Revoke,
    Segment,
    StageReport,
    Submit,
)
from flowspec.core.run.history import History
from flowspec.core.run.limits import TREE_ROWS
from flowspec.strategies import build
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.strategy import Auto
from tests.toy import limits


class Draft:
    def __init__(self, stages: int = 1, history: History | None = None) -> None:
        self.machine = DraftMachine(limits(stages), build, history)
        self.seqs: dict[str, int] = {}

    def receive(self, message: Message, sender: str = "s1", now: float = 0.0) -> list[Output]:
        self.seqs[sender] = self.seqs.get(sender, 0) + 1
        return list(
            self.machine.step(Received((Envelope(sender, self.seqs[sender], message),)), now)
        )

    def submit(self, job: str = "j", **fields: str) -> list[Output]:
        return self.receive(Submit(job, 1, tuple(fields.items())), "scheduler")


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
    accepted = one(outputs, Accepted)
    assert isinstance(accepted, Accepted)
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
    assert run == Run(Encode("j", "hello", raw=False))
    outputs = draft.machine.step(Done(EncodeDone((5, 6))), 0.0)
    assert isinstance(one(outputs, Allocate), Allocate)


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
    finish = one(draft.machine.step(Done(WorkFailed("no template")), 0.0), Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "no template"


def finished(draft: Draft) -> list[Output]:
    """Drive an autoregressive job of one token to its last commit."""
    draft.submit(prompt_ids="[2, 3]", strategy="autoregressive", max_new_tokens="1")
    return draft.receive(Answer("j", 1, 0, (1,), (40,)), now=3.0)


def test_the_last_commit_closes_the_stages_and_the_reports_finish_the_job() -> None:
    draft = Draft()
    outputs = finished(draft)
    commit = one(outputs, Commit)
    assert isinstance(commit, Commit)
    assert (commit.tokens, commit.finish, commit.offset, commit.advance) == ((40,), "length", 1, 1)
    assert messages(outputs) == [Close("j", 1)]
    finish = one(draft.receive(StageReport("j", 1, 1, Meter(useful=1)), now=3.1), Finish)
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
    outputs = draft.receive(Fault("j", 1, "s1", "stage 1 is on fire"))
    finish = one(outputs, Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "stage 1 is on fire"
    assert messages(outputs) == [Close("j", 1)]
    assert draft.machine.sessions == {}


def test_a_gap_in_what_the_last_stage_sends_ends_the_job() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    draft.seqs["s1"] = 4
    finish = one(draft.receive(Answer("j", 1, 0, (0,), (40,))), Finish)
    assert isinstance(finish, Finish)
    assert "one was lost" in finish.error


def test_revoked_jobs_are_forgotten_without_a_word() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    draft.submit("k", prompt="text")
    assert draft.receive(Revoke("j", 2), "scheduler") == [Release("j")]
    assert draft.receive(Revoke("k", 2), "scheduler") == [Release("k")], (
        "else its part of the log stays for good"
    )
    assert draft.receive(Answer("j", 1, 0, (0,), (40,))) == []
    assert not draft.machine.runnable


def test_a_refused_write_fails_the_job_or_ends_it_here() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    finish = one(draft.machine.step(Refused("j", 1, False, "the log of s1 is full"), 0.0), Finish)
    assert isinstance(finish, Finish)
    assert finish.error == "the log of s1 is full"
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    assert draft.machine.step(Refused("j", 1, True, ""), 0.0) == [Release("j")]
    assert draft.machine.step(Refused("j", 1, True, ""), 0.0) == []


def test_a_second_submit_of_a_running_job_changes_nothing() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    assert draft.submit(prompt_ids="[2]", strategy="autoregressive") == []


def test_a_token_outside_the_vocabulary_ends_the_job() -> None:
    draft = Draft()
    draft.submit(prompt_ids="[2]", strategy="autoregressive")
    finish = one(draft.receive(Answer("j", 1, 0, (0,), (1 << 62,))), Finish)
    assert "outside the vocabulary" in finish.error


def test_a_long_prompt_has_as_long_a_patience_as_it_has_pieces() -> None:
    draft = Draft()
    draft.submit(prompt_ids=json.dumps([2] * 130), strategy="autoregressive")
    one_piece = Draft()
    one_piece.submit(prompt_ids="[2]", strategy="autoregressive")
    assert draft.machine.deadline is not None
    assert one_piece.machine.deadline is not None
    assert draft.machine.deadline == 3 * one_piece.machine.deadline


def answered(draft: Draft, job: str, **fields: str) -> Auto:
    """The strategy of a job whose prompt of 20 tokens, then two lone rows, were answered after a
    second each.
    """
    draft.seqs.clear()  # a job counts what is sent for it
    draft.submit(job, prompt_ids=json.dumps([2] * 20), strategy="auto", **fields)
    strategy = draft.machine.sessions[job].strategy
    assert isinstance(strategy, Auto)
    draft.receive(Answer(job, 1, 0, (19,), (40,), seconds=1.0), now=1.0)
    draft.receive(Answer(job, 1, 1, (20,), (41,), seconds=0.5), now=2.0)
    root = draft.machine.sessions[job].tree.root
    draft.receive(Answer(job, 1, 2, (root,), (42,), seconds=0.5), now=3.0)
    return strategy


def test_jobs_share_what_they_find_out() -> None:
    history = History()
    known = history.recall(CostHistory)
    draft = Draft(history=history)
    answered(draft, "j")
    assert (known.passes.single, known.passes.widest) == (0.5, 20)
    assert known.rate > 0
    draft.submit("k", prompt_ids="[2]", strategy="auto")
    session = draft.machine.sessions["k"]
    assert isinstance(session.strategy, Auto)
    assert session.strategy.sizer.sizing(0, 0.0).rows == 40
    assert session.strategy.sizer.price(1) > 0


def test_a_job_that_is_recorded_starts_without_history_and_leaves_none() -> None:
    history = History()
    known = history.recall(CostHistory)
    draft = Draft(history=history)
    recorded = answered(draft, "j", record="1")
    assert recorded.sizer.price(1) > 0, "of itself it learns"
    assert (known.passes.widest, known.rate) == (0, 0.0)
    answered(draft, "k")
    rate = known.rate
    draft.submit("l", prompt_ids="[2]", strategy="auto", record="1")
    session = draft.machine.sessions["l"]
    assert isinstance(session.strategy, Auto)
    assert session.strategy.sizer.sizing(0, 0.0).rows == 1
    assert session.strategy.sizer.price(1) == 0
    assert (known.passes.widest, known.rate) == (20, rate)
