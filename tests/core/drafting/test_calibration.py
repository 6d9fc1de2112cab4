"""The acceptance table: observed hits raise values; no candidate exceeds its ancestors' bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.calibration import (
    MOST,
    RANKS,
    REMEMBERED,
    Calibration,
    Calibrations,
    Scaling,
)
from flowspec.core.tree.tree import Expansion, Tree


def watch(table: Calibration | Scaling, expansion: Expansion, token: int) -> None:
    """Observe that the target chose ``token`` after a node with ``expansion``."""
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    tree.expand(root, expansion)
    table.observe(tree[root], token)


def shares(expansion: Expansion) -> dict[int, float]:
    return {
        token: math.exp(value)
        for token, value in zip(expansion.tokens, expansion.values, strict=True)
    }


@given(
    st.lists(st.floats(-20, 0), min_size=1, max_size=40).map(
        lambda values: sorted(values, reverse=True)
    ),
    st.booleans(),
    st.lists(st.integers(0, 50), max_size=30),
)
def test_values_are_logs_of_shares_best_first(
    values: list[float], coupled: bool, seen: list[int]
) -> None:
    table = Calibration(coupled)
    for token in seen:
        watch(table, table.expansion(range(len(values)), values), token)
    expansion = table.expansion(range(len(values)), values)
    assert sorted(expansion.tokens) == list(range(len(values)))
    assert list(expansion.values) == sorted(expansion.values, reverse=True)
    assert all(value < 0 for value in expansion.values)


def test_a_lead_makes_the_first_worth_more_and_a_lag_the_others_less() -> None:
    table = Calibration(coupled=True)
    close = table.expansion([1, 2], [0.0, -0.1])
    clear = table.expansion([1, 2], [0.0, -7.0])
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
    table = Calibration(coupled=True)
    tree = Tree(0)
    table.observe(tree[tree.plant(0, 0, -1)], 5)
    assert table.expansion([], []) == Expansion((), (), ())
    (alone,) = table.expansion([4], [0.0]).values
    assert alone > table.expansion([4, 5], [0.0, -1.0]).values[0], (
        "no other candidate was considered"
    )


def test_a_source_whose_best_was_credited_to_another_does_not_lead_with_its_second() -> None:
    """Both sources propose 5 first; the second source's 7 is three nats below it."""
    expansion = Calibration(coupled=True).expansion(
        [5, 6, 7, 8], [0.0, -1.0, -3.0, -2.0], [0, 0, 1, 0]
    )
    assert expansion.tokens[0] == 5
    assert shares(expansion)[7] < shares(expansion)[6]


@pytest.mark.parametrize(
    "table_of", [lambda: Calibration(True), lambda: Calibration(False), Scaling]
)
def test_what_is_learnt_of_one_source_says_nothing_of_a_later_one(
    table_of: Callable[[], Calibration | Scaling],
) -> None:
    table = table_of()
    own = [0.0, -0.6]
    for _ in range(30):
        watch(table, table.expansion([1, 2], own), 2)
    assert (
        table.expansion([1, 2], own, [1, 1]).values
        == table_of().expansion([1, 2], own, [1, 1]).values
    )


#: A drafter's own log-probabilities, best first.
OWN = st.lists(st.floats(-12, 0), min_size=1, max_size=40).map(
    lambda values: sorted(values, reverse=True)
)


@given(OWN, st.lists(st.integers(0, 50), max_size=30))
def test_scaled_values_are_best_first_and_never_certain(own: list[float], seen: list[int]) -> None:
    table = Scaling()
    for token in seen:
        watch(table, table.expansion(range(len(own)), own), token)
    found = table.expansion(range(len(own)), own)
    assert sorted(found.tokens) == list(range(len(own)))
    assert list(found.values) == sorted(found.values, reverse=True)
    assert max(found.values) <= math.log(MOST)
    assert found.raw == tuple(own[token] for token in found.tokens), (
        "the drafter's own values are kept"
    )
    assert len(found.cells) == len(own)


@given(OWN)
def test_before_anything_was_seen_the_drafter_is_believed(own: list[float]) -> None:
    found = Scaling().expansion(range(len(own)), own)
    assert found.tokens == tuple(range(len(own)))
    assert all(
        math.isclose(value, min(raw, math.log(MOST)))
        for value, raw in zip(found.values, own, strict=True)
    )


@given(OWN, st.lists(st.integers(0, 50), max_size=30))
def test_candidates_of_one_cell_keep_the_drafters_order(own: list[float], seen: list[int]) -> None:
    """A ratio applies to a whole cell, so it reorders cells only."""
    table = Scaling()
    own = own + sorted((own[-1] - at / 1000 for at in range(RANKS)), reverse=True)
    for token in seen:
        watch(table, table.expansion(range(len(own)), own), token)
    found = table.expansion(range(len(own)), own)
    assert len(set(found.cells)) < len(own)
    for cell in set(found.cells):
        inside = [raw for raw, its in zip(found.raw, found.cells, strict=True) if its == cell]
        assert inside == sorted(inside, reverse=True)


def test_a_ratio_turns_the_order_of_two_cells_round() -> None:
    table = Scaling()
    assert table.expansion([1, 2], [-0.6, -0.8]).tokens == (1, 2)
    for _ in range(5):
        watch(table, table.expansion([1, 2], [-0.6, -0.8]), 2)
    assert table.expansion([1, 2], [-0.6, -0.8]).tokens == (2, 1)


@given(st.floats(-6, -0.1), st.integers(1, 40), st.booleans())
def test_more_hits_than_promised_raise_a_value_and_fewer_lower_it(
    own: float, times: int, right: bool
) -> None:
    table = Scaling()
    (before,) = table.expansion([1], [own]).values
    for _ in range(times):
        watch(table, table.expansion([1], [own]), 1 if right else 2)
    (after,) = table.expansion([1], [own]).values
    assert after > before if right else after < before


@given(st.floats(0.02, 0.97), st.floats(-4, -0.01))
def test_a_value_converges_on_how_often_such_candidates_are_right(share: float, own: float) -> None:
    table = Scaling()
    count = 400
    found = table.expansion([1], [own])
    for at in range(count):
        watch(table, found, 1 if int((at + 1) * share) > int(at * share) else 2)
    (value,) = table.expansion([1], [own]).values
    held = min(count, REMEMBERED / 2 / (share + math.exp(own)))
    assert abs(math.exp(value) - share) <= (3 + math.exp(-own)) / held


def test_sources_and_ranks_are_scaled_apart() -> None:
    table = Scaling()
    for _ in range(30):
        watch(table, table.expansion([1, 2, 3], [-0.7, -0.7, -0.7], [0, 1, 1]), 2)
    values = shares(table.expansion([1, 2, 3], [-0.7, -0.7, -0.7], [0, 1, 1]))
    assert values[2] > 0.9
    assert values[1] == values[3] < 0.1
    assert shares(table.expansion([4], [-0.7], [2]))[4] == math.exp(-0.7), (
        "a source without observations"
    )


def test_a_node_nobody_drafted_for_scales_nothing() -> None:
    table = Scaling()
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    table.observe(tree[root], 5)
    tree.expand(root, table.expansion([], []))
    table.observe(tree[root], 5)
    assert table.expansion([], []) == Expansion((), (), (), ())
    assert table.expansion([5], [-0.7]).values == (-0.7,)


def test_what_was_true_many_jobs_ago_is_outvoted() -> None:
    for table in (Scaling(), Calibration(True)):
        for token, times in ((1, 5000), (2, 400)):
            for _ in range(times):
                watch(table, table.expansion([1, 3], [-0.5, -2.0]), token)
        assert shares(table.expansion([1, 3], [-0.5, -2.0]))[1] < 0.35


KINDS = list(itertools.product((False, True), repeat=3))


def test_tables_are_kept_apart_by_temperature_coupling_and_what_they_correct() -> None:
    known = Calibrations()
    tables = {}
    for coupled, sampled, scaled in KINDS:
        table = known.table(coupled=coupled, sampled=sampled, scaled=scaled)
        assert isinstance(table, Scaling) == (scaled and not coupled)
        assert known.table(coupled=coupled, sampled=sampled, scaled=scaled) is table
        tables[coupled, sampled, scaled and not coupled] = table
    assert len(set(map(id, tables.values()))) == len(tables) == 6
    other = Calibrations().table(coupled=True, sampled=True, scaled=False)
    assert other is not tables[True, True, False]
