"""The price of a segment's rows: the tokens the job would have made in their time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.session.round_trip import RoundTrip
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.segment_sizing import (
    DELAY_FACTOR,
    MOST_DECISIONS,
    MOST_PASSES,
    MOST_ROWS,
    PRIOR_TOKENS,
    WIDENING,
    SegmentSizer,
)

STAGES = 4
SIZES = st.integers(1, 128)
SECONDS = st.floats(1e-3, 10.0)
#: Answers: (rows, seconds of the slowest pass, of the trip).
ANSWERS = st.lists(st.tuples(SIZES, SECONDS, SECONDS), max_size=60)


def prompt(seconds: float) -> Answer:
    """The answer to a prompt whose slowest pass took ``seconds``."""
    return Answer(RunKey("j", 1), 0, (39,), (5,), seconds=seconds)


def answered(
    sizer: SegmentSizer,
    rows: int,
    slowest: float,
    *,
    trip: float = 9.0,
    tokens: int = 1,
    seconds: float = 1.0,
) -> None:
    """An answer to a segment that met no other segment."""
    answer = Answer(RunKey("j", 1), 1, tuple(range(rows)), (5,) * rows, seconds=slowest)
    sizer.observe(answer, RoundTrip(rows, trip, True), tokens=tokens, seconds=seconds)


def measured(*passes: tuple[int, float]) -> CostHistory:
    """Pass times from passes over the given numbers of rows."""
    known = CostHistory()
    for rows, seconds in passes:
        known.passes.note(rows, seconds)
    return known


def marginal(sizer: SegmentSizer, rows: int) -> float:
    """The yield that one row more than ``rows`` must have."""
    return sizer.price(rows + 1) - sizer.price(rows)


@given(ANSWERS)
def test_before_a_pass_of_one_row_is_known_no_more_are_sent(
    answers: list[tuple[int, float, float]],
) -> None:
    sizer = SegmentSizer(STAGES, CostHistory())
    observed = []
    assert sizer.sizing(0, 0.0).rows == 1
    for rows, slowest, trip in answers:
        answered(sizer, rows, slowest, trip=trip)
        observed.append(rows)
        most = sizer.sizing(0, 0.0).rows
        assert most <= min(MOST_ROWS, max(8, WIDENING * max(observed))), (
            "the cost of many more rows is unknown"
        )
        assert (most > 1) == (1 in observed)


def test_one_row_more_is_free_where_its_pass_takes_no_longer() -> None:
    sizer = SegmentSizer(STAGES, measured((1, 1.0), (8, 1.0), (64, 1.0)))
    answered(sizer, 1, 1.0)
    assert sizer.price(1) == sizer.price(64) > 0
    assert sizer.sizing(0, 0.0).rows == MOST_ROWS


def test_a_second_row_costs_what_its_time_is_worth() -> None:
    """At half a token per second, one more row occupies a stage three seconds longer."""
    sizer = SegmentSizer(STAGES, measured((1, 1.0), (2, 4.0)))
    for _ in range(40):
        answered(sizer, 1, 1.0, tokens=4000, seconds=8000.0)
    assert marginal(sizer, 1) == pytest.approx(DELAY_FACTOR * 0.5 * 3.0, rel=0.01)
    assert marginal(sizer, 1) > 1, "more than any row can yield"


@pytest.mark.parametrize("link", [0.5, 2.0])
def test_where_a_link_is_slower_than_the_stages_its_time_is_what_counts(link: float) -> None:
    """Computing rows is free; a prompt of 40 took ``link`` seconds per row more than a lone row."""
    known = CostHistory()
    sizer = SegmentSizer(2, known)
    sizer.prefilled(RoundTrip(40, 2.0 + 40 * link, True), prompt(1.0))
    answered(sizer, 1, 1.0, trip=2.0)
    assert sizer.price(40) == pytest.approx(DELAY_FACTOR * known.rate * 40 * link)
    assert marginal(sizer, 20) == pytest.approx(DELAY_FACTOR * known.rate * link)


@given(st.floats(0.0, 50.0), ANSWERS)
def test_more_rows_never_cost_less(rate: float, answers: list[tuple[int, float, float]]) -> None:
    known = CostHistory()
    known.rate = rate
    sizer = SegmentSizer(STAGES, known)
    sizer.prefilled(RoundTrip(40, 30.0, True), prompt(1.0))
    for at, (rows, slowest, trip) in enumerate(answers):
        answered(sizer, rows, slowest, trip=trip, tokens=at, seconds=float(at + 1))
    prices = [sizer.price(rows) for rows in range(1, MOST_ROWS + 1)]
    assert all(math.isfinite(price) and price >= 0 for price in prices)
    assert all(few <= more * (1 + 1e-9) for few, more in itertools.pairwise(prices))


@given(st.floats(0.01, 100.0), st.integers(0, 500), SECONDS)
def test_the_rate_is_between_that_of_the_job_before_and_its_own(
    before: float, tokens: int, seconds: float
) -> None:
    known = CostHistory()
    known.rate = before
    answered(SegmentSizer(STAGES, known), 1, 1.0, tokens=tokens, seconds=seconds)
    own = tokens / seconds
    assert min(before, own) * (1 - 1e-9) <= known.rate <= max(before, own) * (1 + 1e-9)
    farther = CostHistory()
    farther.rate = before
    answered(SegmentSizer(STAGES, farther), 1, 1.0, tokens=10 * tokens, seconds=10 * seconds)
    assert abs(farther.rate - own) <= abs(known.rate - own) + 1e-9 * before, (
        "the longer it runs, the more its own rate counts"
    )


def test_short_jobs_one_after_another_do_not_forget_the_rate() -> None:
    known = CostHistory()
    known.rate = 2.5
    for _ in range(200):
        sizer = SegmentSizer(STAGES, known)
        answered(sizer, 1, 0.1, tokens=0, seconds=0.0)
        answered(sizer, 1, 0.1, tokens=2, seconds=0.8)
    assert known.rate == pytest.approx(2.5)


def test_a_pass_most_of_whose_rows_were_pruned_on_the_way_is_not_booked_under_what_was_sent() -> (
    None
):
    known = CostHistory()
    answer = Answer(RunKey("j", 1), 1, (1, 2, 3), (5,) * 3, seconds=0.1)
    SegmentSizer(STAGES, known).observe(answer, RoundTrip(32, 1.0, False), tokens=1, seconds=1.0)
    assert known.passes.widest == 0


def test_the_time_of_a_pass_shared_with_other_jobs_is_that_of_all_its_rows() -> None:
    known = CostHistory()
    sizer = SegmentSizer(STAGES, known)
    alone = Answer(RunKey("j", 1), 1, (1, 2), (5, 5), seconds=1.0, rows=2)
    shared = replace(alone, seconds=3.0, rows=40)
    for answer in (alone, shared):
        sizer.observe(answer, RoundTrip(2, 9.0, False), tokens=1, seconds=1.0)
    assert known.passes.at(2) == 1.0
    assert known.passes.at(40) == 3.0


def test_only_the_first_lone_row_behind_a_prompt_went_the_way_it_went() -> None:
    known = CostHistory()
    sizer = SegmentSizer(2, known)
    sizer.prefilled(RoundTrip(40, 5.0, True), prompt(1.0))
    met = Answer(RunKey("j", 1), 1, (1,), (5,), seconds=1.0)
    sizer.observe(met, RoundTrip(1, 1.0, False), tokens=1, seconds=1.0)
    assert known.row_seconds == 0
    for trip in (3.0, 4.5):
        answered(sizer, 1, 1.0, trip=trip)
    assert known.row_seconds == pytest.approx((5.0 - 3.0) / 40)


def test_a_first_job_begins_at_the_rate_of_plain_decoding() -> None:
    known = CostHistory()
    sizer = SegmentSizer(STAGES, known)
    answered(sizer, 1, 0.5, tokens=0, seconds=0.0)
    assert sizer.price(1) == pytest.approx(DELAY_FACTOR * 0.5 / (STAGES * 0.5))
    assert known.rate == 0, "nothing to remember yet"
    answered(sizer, 1, 0.5, tokens=PRIOR_TOKENS, seconds=PRIOR_TOKENS / 1.5)
    assert known.rate == pytest.approx(
        2 * PRIOR_TOKENS / (PRIOR_TOKENS / 0.5 + PRIOR_TOKENS / 1.5)
    ), "half of each by now"


def test_a_second_job_begins_where_the_first_one_was() -> None:
    known = CostHistory()
    first = SegmentSizer(STAGES, known)
    first.prefilled(RoundTrip(20, 9.0, True), prompt(2.0))
    for rows in (1, 8):
        answered(first, rows, 1.0, tokens=30, seconds=10.0)
    second = SegmentSizer(STAGES, known)
    assert second.sizing(0, 0.0).rows == first.sizing(0, 0.0).rows > 1
    assert [second.price(rows) for rows in (1, 8, 20)] == [first.price(rows) for rows in (1, 8, 20)]
    assert second.price(1) > 0


@given(st.integers(1, 256), ANSWERS)
def test_given_rows_are_kept_whatever_they_cost(
    rows: int, answers: list[tuple[int, float, float]]
) -> None:
    sizer = SegmentSizer(STAGES, measured((1, 1.0), (2, 9.0)), rows)
    for count, slowest, trip in answers:
        answered(sizer, count, slowest, trip=trip, tokens=50)
    assert sizer.sizing(0, 0.1).rows == sizer.fixed_rows == rows


def test_rows_are_free_while_a_stage_takes_less_than_the_drafter() -> None:
    sizer = SegmentSizer(STAGES, measured((1, 1.0), (8, 2.0), (16, 4.0)))
    answered(sizer, 1, 1.0, trip=4.0, tokens=8)
    sizer.sizing(0, 2.0)
    assert sizer.price(8) == sizer.price(1)
    assert sizer.price(16) > sizer.price(8)
    sizer.sizing(0, 0.5)
    assert sizer.price(8) > sizer.price(1)


def test_drafting_fills_a_step_and_ends_with_the_pass_that_does() -> None:
    sizer = SegmentSizer(STAGES, measured((1, 1.0)))
    assert sizer.sizing(0, 0.0).passes >= 1, "nothing drafted yet"
    sizer.chose(1)
    assert sizer.sizing(0, 0.0).passes >= 1, "no pass of the drafter was timed"
    assert sizer.sizing(0, 0.25).passes == 4
    assert sizer.sizing(0, 0.24).passes == 5
    assert sizer.sizing(0, 0.7).passes == 2, "one pass leaves the pipeline idle"
    assert sizer.sizing(0, 3.0).passes == 1
    assert sizer.sizing(0, 1e-6).passes == MOST_PASSES


def test_drafting_has_the_time_of_segments_as_they_were_cut_lately() -> None:
    sizer = SegmentSizer(STAGES, measured((1, 1.0), (8, 3.0)))
    sizer.chose(1)
    few = sizer.sizing(0, 0.5).passes
    for _ in range(20):
        sizer.chose(8)
    assert (few, sizer.sizing(0, 0.5).passes) == (2, 6)


def test_links_that_take_long_are_covered() -> None:
    sizer = SegmentSizer(STAGES, CostHistory())
    assert sizer.sizing(0, 0.1).in_flight == STAGES
    assert sizer.sizing(6, 0.1).in_flight == STAGES
    assert sizer.sizing(11, 0.1).in_flight == 9


@given(st.lists(st.integers(1, MOST_ROWS), max_size=300))
def test_what_is_written_down_are_changes_of_size(chosen: list[int]) -> None:
    sizer = SegmentSizer(STAGES, CostHistory())
    for rows in chosen:
        sizer.chose(rows)
    written = dict(sizer.decisions)
    whens = [when for when, _ in sizer.decisions]
    assert len(whens) <= MOST_DECISIONS
    assert whens == sorted(written)
    assert all(one != other for (_, one), (_, other) in itertools.pairwise(sizer.decisions))
    size = 0
    for at, rows in enumerate(chosen[: whens[-1] + 1] if whens else ()):
        size = written.get(at, size)
        assert size / 2 < rows <= size
    assert bool(written) == bool(chosen)
