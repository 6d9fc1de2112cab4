"""Rows that arrive at a stage: their shape, with and without a drafter's sum beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowspec.core.protocol.machine import Allocate
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.row_types import ROW_TYPES
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.drivers.performers import VerifyPerformer
from flowspec.errors import WireError
from flowspec.model.base import RowArray
from flowspec.model.taps import beside

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
