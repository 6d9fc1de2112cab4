"""The width tuner finds the width with the least expected time between tokens, and keeps it."""

from __future__ import annotations

import itertools

import pytest

from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.tree.tree import Tree
from flowspec.strategies.width_tuner import DECISION_INTERVAL, WIDTHS, WidthTuner


def run(
    tuner: WidthTuner, rank_of: list[int], seconds_of_row: float, verdicts: int = 200
) -> list[int]:
    """Widths after every verdict.

    The target's token has the ranks of ``rank_of`` in turn in a level of the tuner's width.
    """
    widths = []
    for at in range(verdicts):
        tree = Tree(0)
        root = tree.plant(0, 0, -1)
        for rank in range(tuner.width):
            tree.mark_waiting([tree.add(root, 10 + rank, -0.01 * rank)])
        rows = tuner.width if at % 3 else 1
        token = 10 + rank_of[at % len(rank_of)]
        seconds = 1.0 + seconds_of_row * rows
        tuner.observe(
            tree,
            Answer(
                RunKey("j", 1),
                at,
                (root, *range(1000, 999 + rows)),
                (token,) * rows,
                seconds=seconds,
            ),
        )
        widths.append(tuner.width)
    return widths


@pytest.mark.parametrize(
    ("ranks", "row", "low", "high"),
    [
        ([0], 0.01, 2, 4),  # the first is always right: all further rows are wasted
        ([0, 1, 2, 3, 4, 5, 6, 7], 0.001, 8, 16),  # hits up to rank 8, rows nearly free
        ([0, 0, 0, 0, 0, 0, 0, 40], 0.0001, 64, 128),  # a rare hit at a high rank, rows nearly free
    ],
)
def test_it_settles_where_the_formula_is_least(
    ranks: list[int], row: float, low: int, high: int
) -> None:
    widths = run(WidthTuner(8), ranks, row)
    assert all(low <= width <= high for width in widths[100:]), widths[100:]


def test_it_changes_at_most_one_size_up_at_a_time_and_only_now_and_then() -> None:
    widths = run(WidthTuner(8), [0, 3, 40], 0.001)
    for at, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        if before != after:
            assert (at + 1) % DECISION_INTERVAL == 0
            assert WIDTHS.index(after) <= WIDTHS.index(before) + 1


def test_a_width_far_below_the_best_rises_one_size_at_a_time() -> None:
    tuner = WidthTuner(8)
    run(tuner, [40], 0.0001, verdicts=DECISION_INTERVAL)
    tuner.width = WIDTHS[0]
    assert run(tuner, [40], 0.0001, verdicts=DECISION_INTERVAL)[-1] == WIDTHS[1]


def test_answers_that_decide_nothing_are_ignored() -> None:
    tuner = WidthTuner(4)
    tree = Tree(0)
    tree.plant(0, 0, -1)
    for _ in range(40):
        tuner.observe(tree, Answer(RunKey("j", 1), 0, (99,), (5,), seconds=1.0))
    assert tuner.width == 64
