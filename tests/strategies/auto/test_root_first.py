"""On a single stage one segment holds the root and the rows that pay beside it."""

from __future__ import annotations

import math

import pytest

from flowspec.core.tree.tree import Expansion, Tree
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.root_first import RootFirstGrowth

#: The price of a pass that always pays.
LITTLE = 1e-9
HALF = Expansion((1, 2), (math.log(0.5), math.log(0.25)))


def planted() -> Tree:
    tree = Tree(10)
    tree.plant(7, 10, 9)
    return tree


def drafted(tree: Tree, growth: RootFirstGrowth) -> int:
    """Draft until the growth is complete, half of the probability on each best child."""
    passes = 0
    while wanted := growth.proceed(tree):
        passes += 1
        for node in wanted:
            tree.expand(node, HALF)
    return passes


def free(rows: int) -> float:
    return 0.1


def steep(rows: int) -> float:
    return float(rows)


def test_the_root_leads_and_the_rows_have_parents() -> None:
    tree = planted()
    growth = RootFirstGrowth(8, 8, 3, free, LITTLE, CostHistory())
    assert drafted(tree, growth) == 3
    (segment,) = growth.segments(tree)
    assert segment[0] == tree.root
    assert len(segment) == 8
    assert all(tree[node].parent in segment for node in segment[1:])


def test_where_no_row_pays_the_root_goes_alone_and_nothing_is_drafted() -> None:
    tree = planted()
    growth = RootFirstGrowth(8, 8, 3, steep, LITTLE, CostHistory())
    assert drafted(tree, growth) == 0
    assert growth.segments(tree) == [[tree.root]]


@pytest.mark.parametrize(("price", "passes"), [(0.9, 1), (1.1, 0), (0.7, 2)])
def test_an_idle_stage_waits_only_for_passes_that_promise_more_than_it_makes_meanwhile(
    price: float, passes: int
) -> None:
    # A pass promises at most what its leaves are likely to be: 1, then 0.75, then less.
    tree = planted()
    assert drafted(tree, RootFirstGrowth(8, 8, 8, free, price, CostHistory())) == passes


def test_before_a_pass_has_been_timed_the_root_waits_for_one() -> None:
    tree = planted()
    assert drafted(tree, RootFirstGrowth(8, 8, 8, free, 0.0, CostHistory())) == 1


def test_a_drafter_that_is_wrong_is_not_waited_for() -> None:
    costs = CostHistory()
    for _ in range(100):
        costs.note_reach(0.01)
    tree = planted()
    assert drafted(tree, RootFirstGrowth(8, 8, 8, free, 0.1, costs)) == 0
    tree.mark_sent([tree.root])
    assert drafted(tree, RootFirstGrowth(8, 8, 8, free, 0.1, costs)) > 0, "it may have improved"
    assert costs.reach > 0.05


def test_while_the_stage_is_busy_drafting_costs_nothing() -> None:
    tree = planted()
    tree.mark_sent([tree.root])
    assert drafted(tree, RootFirstGrowth(8, 8, 3, free, 2.0, CostHistory())) == 3


def test_what_was_drafted_below_a_root_that_was_never_sent_goes_along() -> None:
    tree = planted()
    growth = RootFirstGrowth(4, 8, 3, free, LITTLE, CostHistory())
    tree.mark_sent([tree.root])
    drafted(tree, growth)
    (segment,) = growth.segments(tree)
    successor = segment[0]
    tree.advance(successor)
    growth.rebase(tree)
    assert growth.segments(tree) == [], "the growth after the verdict drafts further"
    after = RootFirstGrowth(4, 8, 0, free, LITTLE, CostHistory())
    assert after.proceed(tree) == ()
    (sent,) = after.segments(tree)
    assert sent[0] == successor
    assert len(sent) > 1


def test_without_a_price_all_rows_are_sent() -> None:
    tree = planted()
    growth = RootFirstGrowth(5, 8, 8, None, LITTLE, CostHistory())
    drafted(tree, growth)
    assert len(growth.segments(tree)[0]) == 5
