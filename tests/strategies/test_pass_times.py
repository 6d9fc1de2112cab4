"""Pass times by rows: measured sizes, straight lines between them, outliers left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.strategies.pass_times import FORGOTTEN_AFTER, PassTimes

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
