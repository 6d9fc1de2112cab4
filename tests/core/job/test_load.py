"""Shares of a pipeline: plans against brute force, budgets, and what a lone job has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.job.load import PLANNED_ROWS, REPLAN, SIZES, Governor, best_batch, best_plan
from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.run.share import ALONE, RunShare

#: Steps of t(w): rows up to which a pass takes so long.
STEPS = st.lists(st.tuples(st.integers(1, 128), st.floats(0.0, 1.0)), min_size=1, max_size=5)
RUNS = [RunKey(f"j{at}", 1) for at in range(64)]
#: Milliseconds by rows of a stage of the simulated profiles.
BF16 = ((64, 0.0371), (128, 0.0438), (192, 0.0657))
NF4 = ((1, 0.0305), (128, 0.126), (192, 0.137))


def staircase(steps: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds by rows: each step adds some beyond its rows."""

    def seconds(rows: int) -> float:
        return 0.01 + math.fsum(more for most, more in steps if rows > most)

    return seconds


def levels(steps: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds by rows: those of the first step that is wide enough."""
    return lambda rows: next((took for most, took in steps if rows <= most), steps[-1][1])


@given(STEPS, st.integers(1, 64), st.integers(1, 12))
def test_plain_batches_are_the_best_of_all_sizes(
    steps: list[tuple[int, float]], jobs: int, stages: int
) -> None:
    seconds = staircase(steps)
    best = max(
        min(size / seconds(size), jobs / (stages * seconds(size))) for size in range(1, jobs + 1)
    )
    found = best_batch(jobs, stages, seconds)
    assert found.rate == pytest.approx(best)
    assert (found.rows, found.in_flight) == (1, 1)
    assert 1 <= found.batch <= jobs


@given(STEPS, st.integers(2, 64), st.integers(1, 12))
def test_no_plan_is_better_and_a_pass_has_room_for_it(
    steps: list[tuple[int, float]], jobs: int, stages: int
) -> None:
    seconds = staircase(steps)
    found = best_plan(jobs, stages, seconds)
    assert found.rows in SIZES
    assert found.batch == 1 or found.rows * found.batch <= PLANNED_ROWS
    assert found.rate >= best_batch(jobs, stages, seconds).rate * (1 - 1e-9)
    assert 1 <= found.in_flight <= stages


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_trees_narrow_as_jobs_come_where_rows_cost_nothing(stages: int) -> None:
    plans = [best_plan(jobs, stages, lambda rows: 0.04) for jobs in range(2, 200)]
    for few, many in itertools.pairwise(plans):
        assert many.rows * many.in_flight <= few.rows * few.in_flight
    assert plans[0].rows == PLANNED_ROWS // 2
    assert plans[-1].rows == 1


def test_plain_rows_stay_alone_where_the_second_costs_four_times_the_first() -> None:
    seconds = levels(NF4)
    assert [best_batch(jobs, 4, seconds).batch for jobs in (1, 4, 8)] == [1, 1, 1]
    assert best_batch(64, 4, seconds).batch >= 16
    four = best_plan(4, 4, seconds)
    assert (four.rows, four.in_flight, four.batch) == (1, 1, 1)
    eight = best_plan(8, 4, seconds)
    assert eight.rows * eight.batch > 70, "one dear pass is best full"


@given(st.integers(0, 200))
def test_a_lone_job_keeps_all(notes: int) -> None:
    governor = Governor(4)
    for at in range(notes):
        governor.note(answer(RUNS[0], 1 + at % 60, 0.04))
        assert governor.changes(drafting(1)) == {}
    assert governor.changes({}) == {}


def drafting(count: int) -> dict[RunKey, bool]:
    """``count`` runs that grow trees."""
    return dict.fromkeys(RUNS[:count], True)


def answer(run: RunKey, rows: int, seconds: float) -> Answer:
    return Answer(run, 0, (), (), seconds=seconds, rows=rows)


def measured(steps: Sequence[tuple[int, float]], stages: int) -> Governor:
    """A governor that has seen passes of all sizes."""
    governor = Governor(stages)
    seconds = levels(steps)
    for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128):
        governor.note(answer(RUNS[0], rows, seconds(rows)))
    return governor


def test_one_job_makes_passes_of_a_lone_row_until_their_time_is_known() -> None:
    governor = Governor(4)
    governor.note(answer(RUNS[0], 40, 0.04))
    first, *others = governor.changes(drafting(3)).values()
    assert first == RunShare(1, 1, 1, jobs=3)
    assert all(share.rows > 8 for share in others)
    governor.note(answer(RUNS[1], 1, 0.04))
    assert set(governor.changes(drafting(3)).values()) == {others[0]}


def test_every_run_in_turn_is_asked_for_a_lone_row_until_one_makes_it() -> None:
    """A strategy with rows of its own never does."""
    governor = Governor(4)
    governor.note(answer(RUNS[0], 40, 0.04))
    asked = set()
    for _ in range(3 * REPLAN):
        changes = governor.changes(drafting(3))
        asked |= {run for run, share in changes.items() if (share.rows, share.together) == (1, 1)}
        governor.note(answer(RUNS[0], 40, 0.04))
    assert asked == set(RUNS[:3])


def test_the_run_that_is_asked_stays_the_same_while_others_come_and_go() -> None:
    """What it has in flight has to end before it makes a pass of a lone row."""
    governor = Governor(4)
    governor.note(answer(RUNS[0], 40, 0.04))
    asked = []
    for first in (0, 0, 1, 2, 3, 1, 3, 2):
        runs = [*RUNS[first:3], *RUNS[3:9]]
        governor.changes(dict.fromkeys(runs, True))
        asked.append([run for run in runs if governor._given[run].together == 1])
        governor.note(answer(RUNS[4], 40, 0.04))
    assert asked == [[RUNS[0]]] * 2 + [[RUNS[1]]] + [[RUNS[2]]] + [[RUNS[3]]] * 4


@pytest.mark.parametrize(("steps", "stages"), [(BF16, 8), (NF4, 4)])
@given(counts=st.lists(st.integers(0, 64), max_size=12))
def test_shares_fit_into_a_pass_and_end_with_the_company(
    steps: Sequence[tuple[int, float]], stages: int, counts: list[int]
) -> None:
    governor = measured(steps, stages)
    known: dict[RunKey, RunShare] = {}
    for count in [*counts, 1]:
        changes = governor.changes(drafting(count))
        assert all(known.get(run, ALONE) != share for run, share in changes.items())
        known = {run: changes.get(run, known.get(run, ALONE)) for run in RUNS[:count]}
        assert len(set(known.values())) <= 1
        if count < 2:
            assert set(known.values()) <= {ALONE}
            continue
        for share in known.values():
            assert share.jobs == count
            assert share.rows * (count if not share.together else 1) <= max(MOST_ROWS, count)
            assert 1 <= share.in_flight <= stages


def test_the_last_of_several_leaves_nothing_behind() -> None:
    governor = Governor(4)
    governor.note(answer(RUNS[0], 40, 0.04))
    assert len(governor.changes(drafting(2))) == 2
    assert governor.changes({}) == {}
    assert governor.changes(drafting(1)) == {}, "it is a new run by now, and alone"


def test_jobs_that_draft_nothing_share_passes_only_where_that_is_faster() -> None:
    plain = dict.fromkeys(RUNS[:8], False)
    dear = set(measured(NF4, 4).changes(plain).values())
    assert dear == {RunShare(1, 1, 1, jobs=8)}
    flat = set(measured(BF16, 8).changes(plain).values())
    assert flat == {RunShare(1, 1, 0, jobs=8)}
