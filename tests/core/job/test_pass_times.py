"""Pass times by rows: measured sizes, straight lines between them, outliers left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.job.pass_times import FORGOTTEN_AFTER, PassTimes
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.strategies import build

SIZES = st.integers(1, 200)
SECONDS = st.floats(1e-4, 10.0)


@given(st.lists(st.tuples(SIZES, SECONDS), max_size=60), SIZES, SIZES)
def test_more_rows_never_take_less_time(
    noted: list[tuple[int, float]], few: int, more: int
) -> None:
    times = PassTimes()
    for rows, seconds in noted:
        times.note(rows, seconds)
    low = times.at(min(few, more))
    high = times.at(max(few, more))
    assert low <= high + 1e-9 * high
    assert (low > 0) == bool(noted)
    assert times.widest <= max((rows for rows, _ in noted), default=0)
    assert (times.single > 0) == any(rows == 1 for rows, _ in noted)


@given(
    st.floats(1e-3, 1.0),
    st.floats(0.0, 0.1),
    st.sets(st.integers(0, 7), min_size=2).map(sorted),
    st.integers(1, 400),
)
def test_between_and_beyond_what_was_measured_is_a_straight_line(
    base: float, slope: float, powers: list[int], asked: int
) -> None:
    times = PassTimes()
    for power in powers:
        times.note(1 << power, base + slope * (1 << power))
    expected = base + slope * max(
        asked, 1 << powers[0]
    )  # it is unknown whether fewer rows are faster
    assert math.isclose(times.at(asked), expected, rel_tol=1e-6)


def test_one_size_says_nothing_of_others() -> None:
    times = PassTimes()
    times.note(7, 3.0)
    assert times.at(1) == times.at(7) == times.at(100) == 3.0
    assert times.single == 0


def test_a_pass_that_was_held_up_once_is_an_outlier() -> None:
    times = PassTimes()
    for seconds in (1.0, 1.0, 40.0, 1.0, 1.1):
        times.note(1, seconds)
    assert times.single == times.at(1) == 1.0
    for _ in range(20):
        times.note(1, 2.0)
    assert times.single == 2.0, "what lasts is"


def test_a_size_seen_once_and_held_up_then_does_not_outweigh_wider_ones_that_were_not() -> None:
    times = PassTimes()
    times.note(8, 4.0)
    for _ in range(3):
        times.note(1, 0.1)
        times.note(30, 0.1)
    assert times.at(2) == times.at(8) == times.at(30) == 0.1


@given(st.integers(1, 4))
def test_a_size_is_kept_the_longer_the_more_often_it_was_measured(samples: int) -> None:
    times = PassTimes()
    for _ in range(samples):
        times.note(100, 4.0)
    for _ in range(FORGOTTEN_AFTER * samples**2 - 1):
        times.note(1, 0.1)
    assert times.at(100) == pytest.approx(4.0)
    times.note(1, 0.1)
    assert times.at(100) == pytest.approx(0.1)


def test_a_size_that_is_not_seen_again_is_forgotten() -> None:
    times = PassTimes()
    times.note(100, 4.0)
    for _ in range(FORGOTTEN_AFTER - 1):
        times.note(1, 0.1)
    assert times.widest == 100
    times.note(1, 0.1)
    assert (times.widest, times.at(100)) == (1, 0.1)


def answer(run: str, seconds: float, rows: int) -> Answer:
    """The answer to a lone row of ``run``, whose slowest pass was over ``rows`` rows."""
    return Answer(RunKey(run, 1), 1, (1,), (5,), seconds=seconds, rows=rows)


def test_all_answers_about_a_shared_pass_tell_of_one() -> None:
    shared, lone = PassTimes(), PassTimes()
    for seconds in (1.0, 1.0, 1.0, 9.0):
        for run in "abcd":
            shared.note_answer(1, answer(run, seconds, 4))
        lone.note_answer(1, answer("a", seconds, 4))
    assert shared.at(4) == lone.at(4) == 1.0, "one outlier of four passes"
    assert shared._notes == lone._notes == 4


def test_where_no_row_is_ever_alone_one_in_company_is_the_shortest_pass() -> None:
    times = PassTimes()
    times.note_answer(12, answer("a", 3.0, 20))
    assert times.single == 0.0
    times.note_answer(1, answer("b", 2.0, 9))
    assert times.single == 2.0
    times.note_answer(1, answer("b", 1.0, 1))
    assert times.single == 1.0


def test_what_a_pass_takes_is_known_to_all_of_a_pipelines_strategies() -> None:
    history = History()
    history.get(PassTimes).note(1, 2.0)
    auto, specpipe = (build(name, 4) for name in ("auto", "specpipe:width=auto"))
    for strategy in (auto, specpipe):
        strategy.use_history(history)
    assert auto._costs.passes is history.get(PassTimes)  # type: ignore[attr-defined]
    assert specpipe.tuner._passes is history.get(PassTimes)  # type: ignore[attr-defined]
