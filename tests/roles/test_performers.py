"""Rows that arrive: their shape, with and without a drafter's sum beside them, and their turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Allocate, Commit, Complete, Learn, Refused
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.row_types import ROW_TYPES
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import GapError, WireError
from flowspec.model.base import RowArray
from flowspec.model.layers.taps import beside
from flowspec.roles.performers import VerifyPerformer
from flowspec.roles.worker import Worker
from flowspec.transport.base import CommitText, ReadResult

RUN = RunKey("j", 1)
WORK = Pass((Part(RUN, 1, (4, 5), (3, 4), (4, 5), (), (0, 2)),))
HIDDEN, WIDTH = 6, 3


class Given:
    """A link that has the rows of one segment."""

    def __init__(self, rows: RowArray) -> None:
        self.rows = rows

    def take_rows(self, run: RunKey, segment: int) -> RowArray:
        return self.rows


class Keeper:
    """A stage that keeps what it was given."""

    def __init__(self) -> None:
        self.inputs: Any = None

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        pass

    def release(self, run: RunKey) -> None:
        pass

    def run(self, work: Pass, inputs: Any) -> tuple[PassDone, list[RowArray]]:
        self.inputs = inputs
        return PassDone((Choice(),)), [inputs[0]]


def performer(*, returned: bool, width: int = WIDTH) -> VerifyPerformer:
    role = VerifyPerformer(Keeper(), (HIDDEN,), beside=width)
    role.allocate(Allocate(RUN, 8, Sampling(), Returns(hidden=returned)))
    return role


def rows_of(kind: str, *, carried: bool) -> RowArray:
    rows = np.zeros((3, HIDDEN), ROW_TYPES[kind])
    return beside(rows, np.ones((3, WIDTH), np.float32)) if carried else rows


def compute(role: VerifyPerformer, rows: RowArray) -> None:
    role.compute(WORK, Given(rows))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ROW_TYPES)
@pytest.mark.parametrize("returned", [False, True])
def test_only_a_run_that_returns_rows_carries_a_sum(kind: str, returned: bool) -> None:
    role = performer(returned=returned)
    compute(role, rows_of(kind, carried=returned))
    with pytest.raises(WireError, match=r"arrived; expected \[rows, "):
        compute(role, rows_of(kind, carried=not returned))


def test_a_stage_before_the_first_tap_gets_no_sum() -> None:
    role = performer(returned=True, width=0)
    compute(role, rows_of("float32", carried=False))
    with pytest.raises(WireError, match=r"expected \[rows, 6\]"):
        compute(role, rows_of("float32", carried=True))


def test_a_run_that_ended_is_forgotten() -> None:
    role = performer(returned=True)
    role.release(RUN)
    role.allocate(Allocate(RUN, 8, Sampling(), Returns()))
    compute(role, rows_of("float32", carried=False))


def test_too_few_rows_are_refused() -> None:
    role = performer(returned=True)
    with pytest.raises(WireError, match="2 rows arrived for a segment of at least 3"):
        compute(role, rows_of("bfloat16", carried=True)[:2])


OTHER = RunKey("k", 1)


class Several:
    """A link with the rows of some runs."""

    def __init__(self, rows: dict[RunKey, RowArray]) -> None:
        self.rows = rows

    def take_rows(self, run: RunKey, segment: int) -> RowArray:
        if run not in self.rows:
            raise GapError(f"the rows of segment {segment} did not arrive")
        return self.rows[run]


class Doubling(Keeper):
    """A stage that doubles every part's rows."""

    def run(self, work: Pass, inputs: Any) -> tuple[PassDone, list[RowArray]]:
        self.inputs = [part.run for part in work.parts]
        return PassDone((Choice((1,)),) * len(inputs)), [2 * rows for rows in inputs]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros((3, HIDDEN + 1), np.float32), "rows of shape"),
        (np.zeros((2, HIDDEN), np.float32), "2 rows arrived for a segment of at least 3"),
        (None, "did not arrive"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_wrong_rows_of_one_run_fail_its_part_of_a_pass_alone(
    wrong: RowArray | None, says: str, first: bool
) -> None:
    sound = np.ones((3, HIDDEN), np.float32)
    stage = Doubling()
    role = VerifyPerformer(stage, (HIDDEN,))
    link: Any = Several({OTHER: sound} | ({} if wrong is None else {RUN: wrong}))
    parts = (*WORK.parts, replace(WORK.parts[0], run=OTHER))
    order = parts if first else parts[::-1]
    done = role.compute(Pass(order), link)
    assert isinstance(done, PassDone)
    at = order.index(parts[0])
    failed, choice = done.choices[at], done.choices[1 - at]
    assert isinstance(failed, WorkFailed)
    assert says in failed.reason
    assert choice == Choice((1,))
    assert (role.rows(1 - at, (0, 2)) == 2 * sound[[0, 2]]).all()
    assert stage.inputs == [OTHER]


def test_a_pass_whose_parts_all_fail_asks_no_executor() -> None:
    stage = Doubling()
    role = VerifyPerformer(stage, (HIDDEN,))
    link: Any = Several({})
    done = role.compute(Pass((*WORK.parts, replace(WORK.parts[0], run=OTHER))), link)
    assert isinstance(done, PassDone)
    assert all(isinstance(choice, WorkFailed) for choice in done.choices)
    assert stage.inputs is None


@pytest.mark.parametrize("fails", [False, True])
def test_what_others_wait_for_is_written_before_the_drafter_gets_its_rows(fails: bool) -> None:
    everyone = Mock()
    everyone.machine.step.side_effect = [[Learn(RUN, 0, (1,)), Complete(RUN, ("next",))], []]
    everyone.machine.deadline, everyone.machine.runnable = 0.0, False
    everyone.link.read.return_value = ReadResult()
    everyone.link.write.return_value = [Code.OK]
    everyone.performer.learn.side_effect = WireError("cut") if fails else None
    Worker(everyone.machine, everyone.link, everyone.performer).cycle()
    calls = [name for name, *_ in everyone.mock_calls if name in ("link.write", "performer.learn")]
    assert calls == ["link.write", "performer.learn"]
    assert [(one.run, "cut" in one.reason) for one in refusals_of(everyone)] == [
        (RUN, True)
    ] * fails


def test_a_refused_commit_is_told_even_if_the_drafter_cannot_take_the_rows() -> None:
    everyone = Mock()
    commit = Commit(RUN, 0, 0, 1, (7,), "", (), ())
    everyone.machine.step.side_effect = [[Learn(RUN, 0, (1,)), commit], []]
    everyone.machine.deadline, everyone.machine.runnable = 0.0, False
    everyone.link.read.return_value = ReadResult()
    everyone.link.write.return_value = [Code.GAP]
    everyone.performer.written.return_value = CommitText(commit, "", (0,))
    everyone.performer.learn.side_effect = WireError("cut")
    Worker(everyone.machine, everyone.link, everyone.performer).cycle()
    assert [(one.run, one.is_commit) for one in refusals_of(everyone)] == [(RUN, True)]


def refusals_of(everyone: Mock) -> list[Refused]:
    """What the worker told its machine after the first step."""
    told = [call.args[0] for call in everyone.machine.step.call_args_list[1:]]
    assert all(isinstance(one, Refused) for one in told)
    return told
