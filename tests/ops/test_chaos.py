"""Chaos finds what it should, and nothing on a pipeline that works."""

from __future__ import annotations

import pytest

from ops.chaos import __main__ as chaos
from ops.chaos import oracle
from ops.chaos.__main__ import report
from ops.chaos.faults import FAULTS, OF_BROKER, OF_STRAIGHT, TAKES_DATA
from ops.chaos.oracle import problem_of
from ops.chaos.pipeline import TOKENS, JobText, SentJob

TEXT = (4, 5, 6, 7)


def job(ids: tuple[int, ...] = TEXT, ended: str = "length", error: str = "") -> SentJob:
    return SentJob("1-0", JobText((1, 2), 0.0), "flowspec", 0.0, list(ids), error, ended)


@pytest.mark.parametrize(
    ("found", "lost", "problem"),
    [
        (job(), False, ""),
        (job((4, 5, 6, 8)), False, "has another text"),
        (job((4, 5, 6)), True, "has another text"),
        (job((4, 5), "error", "a worker was lost"), False, ""),
        (job((4, 6), "error", "a worker was lost"), False, "has another text before its error"),
        (job((4, 5), "error", "two\nlines"), False, "in the place of one line"),
        (job((4, 5), "error"), False, "in the place of one line"),
        (job((4, 6), "error", "its record was deleted"), True, "has another text before its error"),
        (job((4, 5), "lost", "lost"), True, ""),
        (job((4, 5), "lost", "lost"), False, "was lost without a word"),
        (job((4, 5), ""), True, "has not ended after"),
    ],
)
def test_what_a_user_must_not_see_is_a_problem(found: SentJob, lost: bool, problem: str) -> None:
    said = problem_of(found, TEXT, may_be_lost=lost)
    assert problem in said and bool(said) == bool(problem)


def test_the_faults_that_take_data_are_faults() -> None:
    assert FAULTS.keys() > TAKES_DATA | OF_STRAIGHT | OF_BROKER


@pytest.mark.live
def test_a_pipeline_that_is_broken_serves_on_and_a_wrong_text_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = chaos.run(0, 2, "kill")
    assert found.problems == []
    assert sum(found.faults.values()) == 2
    assert "problems: 0" in "\n".join(report([found]))
    monkeypatch.setattr(oracle, "text_after", lambda *_: (1,) * TOKENS)
    monkeypatch.setattr(oracle, "prompts", lambda _: ((0, 38, 915),))
    monkeypatch.setattr(chaos, "STRATEGIES", ("chain",))
    found = chaos.run(2, 1, "scripts")
    assert any("has another text" in problem for problem in found.problems)


def test_a_role_that_collects_open_files_is_seen() -> None:
    found, most = chaos.SeedResult(3), 20 + chaos.MORE_FILES
    after = {"draft": most, "verify-1": 60, "verify-2": 900}
    chaos._check_files({"draft": 20, "verify-1": 20, "broker": 5}, after, found)
    assert found.problems == ["seed 3: verify-1 had 20 files open and has 60"]


@pytest.mark.gate
@pytest.mark.live
@pytest.mark.parametrize(("seed", "faults"), [(200, "killed"), (201, "broker"), (202, "entry")])
def test_a_pipeline_of_the_gate_serves_on(seed: int, faults: str) -> None:
    """Of the first with a middle model, of the second with straight rows."""
    assert chaos.run(seed, 3, faults).problems == []
