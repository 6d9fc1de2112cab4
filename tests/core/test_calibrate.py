"""The online table: what was right gains value, and no candidate is worth more than its ancestors allow."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.calibrate import Calibration
from flowspec.core.tree import Expansion, Tree


def watch(table: Calibration, expansion: Expansion, token: int) -> None:
    """The target chose ``token`` after a node with ``expansion``."""
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    tree.expand(root, expansion)
    table.observe(tree[root], token)


def shares(expansion: Expansion) -> dict[int, float]:
    return {token: math.exp(value) for token, value in zip(expansion.tokens, expansion.values, strict=True)}


@given(
    st.lists(st.floats(-20, 0), min_size=1, max_size=40).map(lambda values: sorted(values, reverse=True)),
    st.booleans(),
    st.lists(st.integers(0, 50), max_size=30),
)
def test_values_are_logs_of_shares_best_first(values: list[float], coupled: bool, seen: list[int]) -> None:
    table = Calibration(coupled)
    for token in seen:
        watch(table, table.expansion(range(len(values)), values), token)
    expansion = table.expansion(range(len(values)), values)
    assert sorted(expansion.tokens) == list(range(len(values)))
    assert list(expansion.values) == sorted(expansion.values, reverse=True)
    assert all(value < 0 for value in expansion.values)


def test_a_lead_makes_the_first_worth_more_and_a_lag_the_others_less() -> None:
    table = Calibration(coupled=True)
    close, clear = table.expansion([1, 2], [0.0, -0.1]), table.expansion([1, 2], [0.0, -7.0])
    assert shares(clear)[1] > shares(close)[1]
    assert shares(clear)[2] < shares(close)[2]


def test_what_was_right_gains_and_what_was_wrong_loses() -> None:
    table = Calibration(coupled=True)
    before = shares(table.expansion([1, 2], [0.0, -1.2]))
    for _ in range(30):
        watch(table, table.expansion([1, 2], [0.0, -1.2]), 2)
    after = shares(table.expansion([1, 2], [0.0, -1.2]))
    assert after[2] > before[2]
    assert after[1] < before[1]
    assert table.expansion([1, 2], [0.0, -1.2]).tokens == (2, 1), "order follows value, not rank"


def test_sources_are_judged_apart() -> None:
    table = Calibration(coupled=False)
    for _ in range(30):
        watch(table, table.expansion([1, 2], [-0.7, -0.7], [0, 1]), 2)
    values = shares(table.expansion([1, 2], [-0.7, -0.7], [0, 1]))
    assert values[2] > 0.8
    assert values[1] < 0.2


def test_an_uncoupled_candidates_own_probability_is_where_it_begins() -> None:
    values = shares(Calibration(coupled=False).expansion([1, 2, 3], [-0.1, -1.2, -5.0], [0, 0, 1]))
    assert values[1] > values[2] > values[3]


def test_nodes_nobody_drafted_for_teach_nothing() -> None:
    table, tree = Calibration(coupled=True), Tree(0)
    table.observe(tree[tree.plant(0, 0, -1)], 5)
    assert table.expansion([], []) == Expansion((), (), ())
    (alone,) = table.expansion([4], [0.0]).values
    assert alone > table.expansion([4, 5], [0.0, -1.0]).values[0], "nobody else was thought of"


def test_a_source_whose_best_was_credited_to_another_does_not_lead_with_its_second() -> None:
    """Both name 5 first; 7 lies three nats behind it."""
    expansion = Calibration(coupled=True).expansion([5, 6, 7, 8], [0.0, -1.0, -3.0, -2.0], [0, 0, 1, 0])
    assert expansion.tokens[0] == 5
    assert shares(expansion)[7] < shares(expansion)[6]
