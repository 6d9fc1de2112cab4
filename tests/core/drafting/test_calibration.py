"""Calibrated values: shares of one node's candidates that follow what was accepted before."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.calibration import (
    COUPLED,
    GREEDY,
    MOST,
    MOST_WEIGHT,
    RANKS,
    RATE,
    SAMPLED,
    SLOPES,
    Calibration,
    Calibrations,
    Prior,
)
from flowspec.core.tree.tree import Expansion, Tree

PRIORS = {"greedy": GREEDY, "sampled": SAMPLED, "coupled": COUPLED}
DESCENDING = st.lists(st.floats(-20, 0), min_size=1, max_size=40).map(
    lambda values: sorted(values, reverse=True)
)
OUTSIDE = 99


def made(prior: Prior = GREEDY) -> Calibration:
    return Calibration(prior, coupled=prior is COUPLED)


def shares(expansion: Expansion) -> dict[int, float]:
    return {
        token: math.exp(value)
        for token, value in zip(expansion.tokens, expansion.values, strict=True)
    }


@given(DESCENDING, st.sampled_from(sorted(PRIORS)), st.lists(st.integers(0, 50), max_size=30))
def test_values_are_logs_of_shares_best_first(
    values: list[float], prior: str, seen: list[int]
) -> None:
    model = made(PRIORS[prior])
    for token in seen:
        model.observe(model.expansion(range(len(values)), values), token)
    expansion = model.expansion(range(len(values)), values)
    assert sorted(expansion.tokens) == list(range(len(values)))
    assert list(expansion.values) == sorted(expansion.values, reverse=True)
    assert all(value <= math.log(MOST) for value in expansion.values)
    assert sum(shares(expansion).values()) < 1, "the rest is the share of a miss"
    assert expansion.raw == tuple(values[token] for token in expansion.tokens)


@given(DESCENDING, st.sampled_from(sorted(PRIORS)))
def test_before_anything_was_seen_the_drafters_order_stands(
    values: list[float], prior: str
) -> None:
    expansion = made(PRIORS[prior]).expansion(range(len(values)), values)
    assert expansion.tokens == tuple(range(len(values)))


def test_a_lead_makes_the_first_worth_more_and_a_lag_the_others_less() -> None:
    model = made(COUPLED)
    close = shares(model.expansion([1, 2], [0.0, -0.1]))
    clear = shares(model.expansion([1, 2], [0.0, -5.0]))
    assert clear[1] > close[1] > close[2] > clear[2]


@pytest.mark.parametrize("prior", sorted(PRIORS))
def test_what_was_right_gains_and_what_was_wrong_loses(prior: str) -> None:
    model = made(PRIORS[prior])
    before = shares(model.expansion([1, 2, 3], [0.0, -1.0, -2.0]))
    for _ in range(20):
        model.observe(model.expansion([1, 2, 3], [0.0, -1.0, -2.0]), 2)
    after = shares(model.expansion([1, 2, 3], [0.0, -1.0, -2.0]))
    assert after[2] > before[2]
    assert after[1] < before[1]


def test_a_miss_lowers_every_candidate() -> None:
    model = made()
    before = shares(model.expansion([1, 2], [-0.5, -1.5]))
    for _ in range(20):
        model.observe(model.expansion([1, 2], [-0.5, -1.5]), OUTSIDE)
    after = shares(model.expansion([1, 2], [-0.5, -1.5]))
    assert all(after[token] < before[token] for token in (1, 2))


@pytest.mark.parametrize(("hits", "expected"), [(0.9, 0.9), (0.5, 0.5), (0.2, 0.2)])
def test_shares_converge_on_how_often_such_candidates_are_right(
    hits: float, expected: float
) -> None:
    """Two candidates; the second is right in half of the cases in which the first is wrong."""
    model = made()
    rng = random.Random(1)
    for _ in range(1500):
        draw = rng.random()
        token = 1 if draw < hits else 2 if draw < hits + (1 - hits) / 2 else OUTSIDE
        model.observe(model.expansion([1, 2], [-0.4, -1.6]), token)
    found = shares(model.expansion([1, 2], [-0.4, -1.6]))
    assert found[1] == pytest.approx(expected, abs=0.08)
    assert found[2] == pytest.approx((1 - expected) / 2, abs=0.08)


def test_confidence_is_told_from_its_lack() -> None:
    """A clear lead is always right, a narrow one every second time."""
    model = made()
    clear, narrow = [-0.1, -3.0], [-0.7, -0.9]
    for at in range(400):
        model.observe(model.expansion([1, 2], clear), 1)
        model.observe(model.expansion([1, 2], narrow), 1 + at % 2)
    assert shares(model.expansion([1, 2], clear))[1] > 0.9
    assert shares(model.expansion([1, 2], narrow))[1] == pytest.approx(0.5, abs=0.12)


def test_sources_are_judged_apart() -> None:
    model = made()
    tokens, values, sources = [1, 2], [-0.5, -0.5], (0, 1)
    for _ in range(60):
        model.observe(model.expansion(tokens, values, sources), 2)
    found = shares(model.expansion(tokens, values, sources))
    assert found[2] > 4 * found[1]


def test_what_is_learnt_of_one_source_says_nothing_of_another() -> None:
    model = made()
    fresh = made()
    for _ in range(50):
        model.observe(model.expansion([1, 2], [-0.5, -2.0], (0, 0)), 2)
    learnt = shares(model.expansion([1, 2], [-0.5, -2.0], (5, 5)))
    unseen = shares(fresh.expansion([1, 2], [-0.5, -2.0], (5, 5)))
    assert learnt[1] / learnt[2] == pytest.approx(unseen[1] / unseen[2])


def test_a_source_whose_best_was_credited_to_another_does_not_lead_with_its_second() -> None:
    model = made(COUPLED)
    expansion = model.expansion([1, 2, 3], [0.0, -0.5, -0.9], (0, 1, 1))
    assert dict(zip(expansion.tokens, expansion.cells, strict=True)) == {
        1: 0,
        2: RANKS + 1,
        3: RANKS + 2,
    }


def test_ranks_beyond_the_last_share_it() -> None:
    count = RANKS + 4
    expansion = made().expansion(range(count), [-float(rank) for rank in range(count)])
    assert expansion.cells[-5:] == (RANKS - 1,) * 5


def test_candidates_of_equal_value_keep_the_drafters_order() -> None:
    expansion = made(SAMPLED).expansion(range(RANKS + 8), [-1.0] * (RANKS + 8))
    assert expansion.tokens == tuple(range(RANKS + 8))


def test_nodes_nobody_drafted_for_teach_nothing() -> None:
    model = made()
    before = model.expansion([1, 2], [-0.5, -1.0])
    tree = Tree(0)
    root = tree.plant(0, 0, -1)
    model.observe(tree[root].expansion, 2)
    model.observe(Expansion((1, 2), (-0.1, -2.0)), 2)  # not calibrated: it names no cells
    model.observe(Expansion((), ()), 2)
    assert model.expansion([1, 2], [-0.5, -1.0]) == before


def test_what_was_true_many_jobs_ago_is_outvoted() -> None:
    model = made()
    for _ in range(3000):
        model.observe(model.expansion([1, 2], [-0.5, -1.5]), 1)
    for _ in range(150):
        model.observe(model.expansion([1, 2], [-0.5, -1.5]), 2)
    found = shares(model.expansion([1, 2], [-0.5, -1.5]))
    assert found[2] > found[1]


@given(st.lists(st.tuples(DESCENDING, st.integers(0, 50)), max_size=60))
def test_slopes_stay_in_their_range_and_steps_are_small(
    seen: list[tuple[list[float], int]],
) -> None:
    model = made()
    for values, token in seen:
        expansion = model.expansion(range(len(values)), values)
        before = shares(expansion)
        model.observe(expansion, token)
        after = shares(model.expansion(range(len(values)), values))
        if token in after:
            assert after[token] >= before[token] - 1e-9, "what was seen does not become less likely"
    for slope in model._slopes.values():
        assert SLOPES[0] <= slope.value <= SLOPES[1]
        assert slope.weight <= MOST_WEIGHT
    assert RATE < 1


def test_models_are_kept_apart_by_temperature_and_coupling() -> None:
    known = Calibrations()
    models = [
        known.model(coupled=False, sampled=False),
        known.model(coupled=False, sampled=True),
        known.model(coupled=True, sampled=True),
    ]
    assert len({id(model) for model in models}) == 3
    assert known.model(coupled=True, sampled=True) is models[2]


def test_impossible_candidates_have_a_value_and_a_node_without_candidates_has_none() -> None:
    found = made().expansion([1, 2], [-900.0, -1000.0])
    assert found.tokens == (1, 2)
    assert all(math.isfinite(value) for value in found.values)
    assert made().expansion((), ()) == Expansion((), ())
