"""The formulas against the papers' figures, their equations and their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.tree import Tree
from flowspec.errors import ConfigError
from flowspec.strategies.expected_tbt import best_width, expected_tbt
from ops.bench.closed_forms import (
    cumulative_score,
    pipedec_step,
    pipeline_token_seconds,
    pipespec_limit,
    pipespec_tokens,
    speculative_speedup,
    speculative_tokens,
    verification_share,
)

SHARE = st.floats(0, 1)
INSIDE = st.floats(0.001, 0.99)
WINDOW = st.integers(1, 64)
SECONDS = st.floats(0.001, 1000)
STEPS = st.lists(SECONDS, min_size=1, max_size=20)
LOGS = st.lists(st.floats(-50, 0), max_size=20)


@given(LOGS, st.floats(-50, 0))
def test_a_score_is_0_at_the_root_and_never_above_the_parents(
    path: list[float], value: float
) -> None:
    assert cumulative_score([]) == 0
    assert cumulative_score([*path, value]) <= cumulative_score(path)


@given(LOGS)
def test_the_trees_scores_are_the_formulas(path: list[float]) -> None:
    tree = Tree(0)
    node = tree.plant(1, 0, -1)
    for value in path:
        node = tree.add(node, 1, value)
    assert tree[node].score == pytest.approx(cumulative_score(path))


def test_pipedecs_published_speedups_lie_within_its_model() -> None:
    """4.46 to 7.79 with 14 groups.

    Below one token per timestep, above one refill per four tokens.
    """
    compute = [0.03] * 14
    transfer = [0.002] * 14
    plain = pipeline_token_seconds(compute, transfer)
    assert plain / pipedec_step(0.017, compute, transfer) == pytest.approx(14)
    groups = [sum(pair) for pair in zip(compute, transfer, strict=True)]
    assert plain / expected_tbt(groups, 0.75) < 4.46
    assert plain / expected_tbt(groups, 0.95) > 7.79


@given(STEPS, SECONDS, st.floats(0, 4))
def test_a_timestep_lasts_as_long_as_its_slowest_part(
    compute: list[float], draft: float, extra: float
) -> None:
    transfer = [0.5] * len(compute)
    step = pipedec_step(draft, compute, transfer, extra)
    assert step >= draft
    assert all(step >= (1 + extra) * (seconds + 0.5) for seconds in compute)
    assert step in {draft, (1 + extra) * (max(compute) + 0.5)}


def test_specpipes_published_figure_lies_between_its_published_hit_ratios() -> None:
    """Eight stages: 302.39 ms per token without speculation, 54.67 ms with it.

    Hits: 0.81 at top-1, 0.99 at top-8.
    """
    steps = [302.39 / 8] * 8
    assert expected_tbt(steps, 0.99) < 54.67 < expected_tbt(steps, 0.81)
    assert expected_tbt(steps, 0.944) == pytest.approx(54.67, rel=0.01)
    assert expected_tbt(steps, 0.936, refill=7) == pytest.approx(54.67, rel=0.01)


@given(STEPS, SHARE, SHARE)
def test_a_better_guess_never_costs_time(steps: list[float], one: float, other: float) -> None:
    worse, better = sorted((one, other))
    assert expected_tbt(steps, better) <= expected_tbt(steps, worse)
    assert expected_tbt(steps, 1.0) == max(steps)
    assert expected_tbt(steps, 0.0) == pytest.approx(max(steps) + sum(steps))


@given(SECONDS, st.integers(1, 30), SHARE)
def test_equal_stages_have_the_short_form_and_the_refill_is_a_choice(
    t: float, n: int, accuracy: float
) -> None:
    assert expected_tbt([t] * n, accuracy) == pytest.approx(t * (1 + n * (1 - accuracy)))
    assert expected_tbt([t] * n, accuracy, refill=n - 1) == pytest.approx(
        t * (1 + (n - 1) * (1 - accuracy))
    )


def test_flat_times_that_jump_every_64_rows_and_hits_that_saturate_choose_64() -> None:
    """The shape of SpecPipe's measurements, and its choice."""
    widths = (1, 8, 16, 32, 64, 96, 128)
    times = {width: 1.0 + 0.3 * ((width - 1) // 64) for width in widths}
    hits = {width: 1 - 0.19 / width for width in widths}
    assert best_width(times, hits, stages=8) == 64


@given(
    st.dictionaries(st.integers(1, 128), st.tuples(SECONDS, SHARE), min_size=1, max_size=8),
    st.integers(1, 21),
)
def test_no_width_beats_the_best_and_no_narrower_one_equals_it(
    table: dict[int, tuple[float, float]], stages: int
) -> None:
    times = {width: seconds for width, (seconds, _) in table.items()}
    hits = {width: accuracy for width, (_, accuracy) in table.items()}
    expected = {width: expected_tbt([times[width]] * stages, hits[width]) for width in table}
    best = best_width(times, hits, stages)
    assert all(expected[best] < expected[width] or width >= best for width in table)
    assert expected[best] == min(expected.values())


@given(INSIDE, WINDOW, SHARE)
def test_the_share_of_verifications_is_where_the_chain_ends_from_anywhere(
    a: float, g: int, start: float
) -> None:
    share = start
    for _ in range(1000):
        share = share * a ** (g + 1) + (1 - share) * a
    assert verification_share(a, g) == pytest.approx(share, abs=1e-9)


@given(INSIDE, WINDOW)
def test_the_theorem_and_its_ceiling(a: float, g: int) -> None:
    assert 1 < pipespec_tokens(a, g) < pipespec_limit(a, g) <= g + 1
    assert speculative_tokens(a, g) == pytest.approx((1 - a ** (g + 1)) / (1 - a))


@given(SHARE, SHARE, st.integers(0, 64), st.floats(0.1, 100))
def test_more_acceptance_and_longer_windows_give_more_tokens(
    one: float, other: float, g: int, c: float
) -> None:
    low, high = sorted((one, other))
    for tokens in (speculative_tokens, pipespec_tokens):
        assert tokens(low, g) <= tokens(high, g) * (1 + 1e-12)
        assert tokens(low, g) <= tokens(low, g + 1) * (1 + 1e-12)
    assert speculative_speedup(low, g, c) <= speculative_speedup(high, g, c)


def test_every_step_verifies_as_acceptance_nears_1() -> None:
    assert pipespec_tokens(1.0, 4) == pipespec_limit(1.0, 4) == 5
    assert pipespec_tokens(0.9999, 4) / pipespec_limit(0.9999, 4) == pytest.approx(1, abs=1e-3)
    assert verification_share(1.0, 7) == 1
    assert pipespec_tokens(0.0, 4) == 1


def test_pipespec_is_not_always_better_than_drafting_and_verifying_in_turn() -> None:
    """The counterexample to the paper's claim, in figures."""
    assert pipespec_tokens(0.5, 4) == pytest.approx(1.319, abs=5e-4)
    assert speculative_speedup(0.5, 4, 10) == pytest.approx(1.384, abs=5e-4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cumulative_score([-1.0, 0.1]), "a log-probability is 0.1"),
        (lambda: cumulative_score([math.nan]), "a log-probability is nan"),
        (lambda: pipeline_token_seconds([], []), "compute_seconds is empty"),
        (lambda: pipeline_token_seconds([1.0], [1.0, 2.0]), "1 compute times but 2 transfer times"),
        (lambda: pipedec_step(-1.0, [1.0], [0.0]), "draft_seconds has -1.0"),
        (lambda: pipedec_step(1.0, [1.0], [math.inf]), "transfer_seconds has inf"),
        (lambda: pipedec_step(1.0, [1.0], [0.0], -0.5), "extra is -0.5"),
        (lambda: expected_tbt([], 0.5), "step_seconds is empty"),
        (lambda: expected_tbt([1.0], 1.5), "accuracy is 1.5"),
        (lambda: expected_tbt([1.0], 0.5, refill=-1), "refill is -1"),
        (lambda: best_width({}, {}, 4), "name different widths, or none"),
        (lambda: best_width({1: 1.0}, {2: 1.0}, 4), "name different widths, or none"),
        (lambda: best_width({1: 1.0}, {1: 1.0}, 0), "stages is 0"),
        (lambda: verification_share(-0.1, 4), "acceptance is -0.1"),
        (lambda: speculative_tokens(0.5, -1), "window is -1"),
        (lambda: speculative_speedup(0.5, 4, 0), "draft_speed is 0"),
    ],
)
def test_values_out_of_range_are_said_in_one_line(call: Callable[[], float], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        call()
    assert "\n" not in str(error.value)
