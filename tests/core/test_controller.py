"""How many rows a segment gets: by what passes cost and how often the drafter is right."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.controller import EVERY, FIRST_ROWS, GAIN, PASSES, ROWS, Controller
from flowspec.core.messages import Result
from flowspec.core.tree import Expansion, Tree


def told(controller: Controller, rank: int, *passes: tuple[int, float]) -> None:
    """A verdict in which the token was the drafter's ``rank``-th guess, and passes of (rows, seconds)."""
    for rows, seconds in passes:
        tree = Tree(10)
        root = tree.plant(7, 10, 9)
        tree.expand(root, Expansion(tuple(range(100, 132)), (-1.0,) * 32))
        controller.hear(tree, Result("j", 1, 1, (root,), (100 + rank,), seconds=seconds), rows)


def test_rows_that_cost_nothing_are_taken() -> None:
    controller = Controller(4)
    for _ in range(40):
        told(controller, 3, (1, 1.0), (64, 1.0))
    assert controller.plan(0, 0.1).rows >= 32


def test_where_many_rows_cost_far_more_a_segment_has_one() -> None:
    controller = Controller(4)
    for _ in range(4):
        told(controller, 0, (1, 1.0), (64, 4.1))
    assert controller.plan(0, 0.1).rows == 1
    assert controller.decisions[0] == (0, FIRST_ROWS)
    assert controller.decisions[-1][1] == 1


def test_a_drafter_that_gets_worse_is_given_more_alternatives() -> None:
    controller = Controller(8)
    for _ in range(64):
        told(controller, 0, (1, 1.0), (8, 1.1), (64, 1.9))
    few = controller.plan(0, 0.1).rows
    for _ in range(64):
        told(controller, 6, (1, 1.0), (8, 1.1), (64, 1.9))
    assert few < controller.plan(0, 0.1).rows


def test_given_rows_are_kept() -> None:
    controller = Controller(4, rows=16)
    for _ in range(30):
        told(controller, 0, (1, 1.0), (16, 9.0))
    assert controller.plan(0, 0.1).rows == 16
    assert controller.decisions == [(0, 16)]


def test_drafting_fills_a_step_and_no_more() -> None:
    controller = Controller(4, rows=64)
    assert controller.plan(0, 0.0).passes >= 1, "nothing measured yet"
    told(controller, 0, (64, 1.0))
    assert controller.plan(0, 0.25).passes == 4
    assert controller.plan(0, 3.0).passes == 1
    assert controller.plan(0, 1e-6).passes == PASSES


def test_links_that_take_long_are_covered() -> None:
    controller = Controller(4)
    assert controller.plan(0, 0.1).in_flight == 4
    assert controller.plan(6, 0.1).in_flight == 4
    assert controller.plan(11, 0.1).in_flight == 9


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(ROWS), st.floats(1e-4, 10.0)), max_size=120))
def test_it_changes_rarely_and_only_for_a_gain(heard: list[tuple[int, int, float]]) -> None:
    controller = Controller(4)
    for rank, rows, seconds in heard:
        told(controller, rank, (rows, seconds))
    whens = [when for when, _ in controller.decisions]
    assert all(rows in ROWS for _, rows in controller.decisions)
    assert whens == sorted(set(whens))
    assert all(later - earlier >= EVERY for earlier, later in itertools.pairwise(whens[3:]))
    assert 0 < GAIN < 1
