"""What jobs learn about their pipeline: pass times, link time per row, a drafter's yield."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.segments import prefill_chunks
from flowspec.strategies.auto.cost_history import (
    PROMPT_ROWS,
    PROMPT_SAMPLES,
    CostHistory,
)

SIZES = st.integers(1, 200)
SECONDS = st.floats(1e-4, 10.0)


def travelled(
    chunks: list[int], stages: int, latency: float, passes: dict[int, float], row: float
) -> tuple[float, float]:
    """Seconds until the last of ``chunks`` is answered by all stages and links, and of its pass."""
    free_stage = [0.0] * stages
    free_link = [0.0] * stages
    end = 0.0
    for size in chunks:
        end = 0.0
        for stage in range(stages):
            end = free_stage[stage] = max(end, free_stage[stage]) + passes[size]
            if stage < stages - 1:
                end = free_link[stage] = max(end, free_link[stage]) + size * row
                end += latency
    return end + 2 * latency, passes[chunks[-1]]


@given(
    prompt=st.integers(PROMPT_ROWS, 400),
    stages=st.integers(2, 21),
    latency=st.floats(0.0, 0.2),
    base=st.floats(1e-3, 0.1),
    slope=st.floats(0.0, 0.01),
    row=st.floats(1e-6, 0.05),
)
def test_what_a_row_costs_a_link_is_told_from_latency_and_computing(
    prompt: int, stages: int, latency: float, base: float, slope: float, row: float
) -> None:
    known = CostHistory()
    sizes = [len(chunk) for chunk in prefill_chunks(prompt)]
    passes = {size: base + slope * size for size in {1, *sizes}}
    seconds, slowest = travelled(sizes, stages, latency, passes, row)
    alone, single = travelled([1], stages, latency, passes, row)
    known.passes.note(1, single)
    assert known.row_seconds == 0
    known.note_prompt(RoundTrip(prompt, seconds, True), slowest, RoundTrip(1, alone, True), stages)
    found = known.row_seconds
    size = sizes[-1]
    # The lone row crossed the links too, and a long prompt's earlier chunks may be a row shorter.
    off = (row + len(sizes) * (slope + row)) / size
    assert row - off <= found + 1e-9 <= row + off + 2e-9


@given(st.integers(1, 12), SECONDS, SECONDS)
def test_links_that_cost_nothing_are_not_charged(stages: int, single: float, slower: float) -> None:
    known = CostHistory()
    known.passes.note(1, single)
    lone = RoundTrip(1, stages * single, True)
    known.note_prompt(
        RoundTrip(40, stages * (single + slower), True), single + slower, lone, stages
    )
    assert known.row_seconds <= 1e-9 * stages * (single + slower)


def test_one_prompt_that_was_held_up_is_an_outlier() -> None:
    known = CostHistory()
    known.passes.note(1, 1.0)
    for seconds in (5.0, 5.0, 60.0):
        known.note_prompt(RoundTrip(40, seconds, True), 1.0, RoundTrip(1, 3.0, True), 2)
    assert known.row_seconds == pytest.approx((5.0 - 3.0) / 40)
    for _ in range(PROMPT_SAMPLES):
        known.note_prompt(RoundTrip(40, 9.0, True), 1.0, RoundTrip(1, 3.0, True), 2)
    assert known.row_seconds == pytest.approx((9.0 - 3.0) / 40), "what lasts is"


def test_a_short_prompt_or_a_row_that_no_stage_timed_tells_nothing() -> None:
    known = CostHistory()
    known.note_prompt(RoundTrip(40, 60.0, True), 1.0, RoundTrip(1, 3.0, True), 2)
    known.passes.note(1, 1.0)
    known.note_prompt(RoundTrip(PROMPT_ROWS - 1, 60.0, True), 1.0, RoundTrip(1, 3.0, True), 2)
    assert known.row_seconds == 0
