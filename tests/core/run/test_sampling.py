"""The keyed draw: golden vectors, its distribution, truncation against a plain version."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.sampling import (
    LEAST_TEMPERATURE,
    MAX_SEED,
    Sampling,
    _best,
    _between_0_and_1,
    choose,
    gumbel,
    perturbed,
    survivors,
    uniform,
)
from flowspec.errors import JobError

MASK = (1 << 64) - 1


def plain_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_uniform(seed: int, index: int, token: int) -> float:
    """The draw of one element in Python integers, without arrays."""
    key = plain_mix(
        plain_mix((seed + 0x9E3779B97F4A7C15) & MASK)
        ^ plain_mix((index * 0xD1B54A32D192ED03 + 1) & MASK)
    )
    bits = plain_mix((key + (token + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
    return (bits + 0.5) * 2.0**-53


GOLDEN = [
    # seed, index, token, 53-bit hash
    (0, 0, 0, 1441733914636387),
    (1, 17, 4095, 279582056198978),
    (MAX_SEED, 1_000_000, 151_935, 2498871601552961),
]


@pytest.mark.parametrize(("seed", "index", "token", "bits"), GOLDEN)
def test_draw_is_the_same_on_every_machine(seed: int, index: int, token: int, bits: int) -> None:
    assert uniform(seed, index, [token])[0] == (bits + 0.5) * 2.0**-53


@given(
    st.integers(0, MAX_SEED),
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20),
)
def test_draw_depends_on_nothing_but_its_three_keys(
    seed: int, index: int, tokens: list[int]
) -> None:
    assert uniform(seed, index, tokens).tolist() == [
        plain_uniform(seed, index, token) for token in tokens
    ]


def test_the_largest_draw_is_below_1() -> None:
    """Without a bound the last 53-bit integer rounds to 1, and its noise is infinite."""
    largest = _between_0_and_1(np.array([0, 2**53 - 1], dtype=np.uint64))
    assert 0 < largest[0] < largest[1] < 1
    assert np.isfinite(-np.log(-np.log(largest))).all()


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel(3, index, np.arange(1000)) for index in range(200)])
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02


HUGE = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("truncated", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-307, 1e-20, 9.9e-6])
def test_a_temperature_next_to_0_is_0(temperature: float, truncated: dict[str, Any]) -> None:
    sampling = Sampling(temperature, seed=3, **truncated)
    assert sampling.temperature == 0.0
    for logits in ([1.0, 9.0, 8.0], [-HUGE, HUGE, 0.0], [-math.inf, 1e-30, 0.0]):
        assert choose(np.array(logits, np.float32), sampling, 7) == 1


@pytest.mark.parametrize("truncated", [{}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [LEAST_TEMPERATURE, 1e300, float(np.finfo(float).max)])
def test_no_temperature_overflows(temperature: float, truncated: dict[str, Any]) -> None:
    """A token without a chance is never drawn, and the best one is, if it is far above the rest."""
    sampling = Sampling(temperature, seed=3, **truncated)
    logits = np.array([-math.inf, HUGE, -HUGE, -math.inf], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        drawn = {choose(logits, sampling, at) for at in range(40)}
    assert drawn == ({1} if temperature == LEAST_TEMPERATURE or truncated.get("top_p") else {1, 2})


def test_greedy_takes_the_largest_and_ignores_seed_and_index() -> None:
    row = np.array([0.5, 3.0, 3.0, -1.0])
    assert {choose(row, Sampling(seed=seed), index) for seed in range(5) for index in range(5)} == {
        1
    }


def chi_square(
    row: np.ndarray, sampling: Sampling, expected: np.ndarray, draws: int
) -> tuple[float, int]:
    counts = np.bincount(
        [choose(row, sampling, index) for index in range(draws)], minlength=row.size
    )
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = float((((counts - draws * expected)[kept]) ** 2 / (draws * expected[kept])).sum())
    return statistic, int(kept.sum()) - 1


@pytest.mark.parametrize("seed", range(5))
def test_draw_follows_the_distribution(seed: int) -> None:
    """Chi-square over 20,000 indices.

    The bound is the 1 - 1e-6 quantile for 11 degrees of freedom. Seeds are fixed; five random ones
    would fail less than once in 200,000 runs.
    """
    row = np.random.default_rng(seed).normal(size=12) * 1.5
    expected = np.exp(row) / np.exp(row).sum()
    statistic, freedom = chi_square(row, Sampling(temperature=1.0, seed=seed), expected, 20_000)
    assert freedom == 11
    assert statistic < 51.0


def test_truncated_draw_follows_the_renormalised_distribution() -> None:
    row = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=11)
    sharpened = np.exp(row / 0.7)[:5] / np.exp(row / 0.7)[:5].sum()
    kept = int((np.cumsum(sharpened) - sharpened < 0.9).sum())
    expected = np.zeros(6)
    expected[:kept] = sharpened[:kept] / sharpened[:kept].sum()
    statistic, _ = chi_square(row, sampling, expected, 20_000)
    assert statistic < 35.0


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    st.integers(0, 35),
    st.floats(0.05, 1.0),
    st.floats(0.2, 3.0),
)
def test_survivors_against_a_plain_restatement(
    logits: list[int], top_k: int, top_p: float, temperature: float
) -> None:
    scores = [logit / temperature for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-scores[token], token))[: top_k or None]
    weights = [math.exp(scores[token] - scores[order[0]]) for token in order]
    kept = []
    before = 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1 and before / sum(weights) >= top_p - 1e-12:
            break
        kept.append(token)
        before += weight
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    got = survivors(np.array(logits, dtype=np.float64), sampling)[0].tolist()
    assert got == kept or abs(len(got) - len(kept)) == 1  # the nucleus edge may round either way
    assert got == order[: len(got)]


def test_truncation_draws_like_the_whole_when_it_keeps_everything() -> None:
    row = np.random.default_rng(0).normal(size=64)
    whole = Sampling(temperature=1.0, seed=5)
    truncated = Sampling(temperature=1.0, seed=5, top_k=64)
    assert [choose(row, whole, at) for at in range(500)] == [
        choose(row, truncated, at) for at in range(500)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": MAX_SEED + 1},
    ],
)
def test_bad_values_are_refused_in_one_line(bad: dict[str, float]) -> None:
    with pytest.raises(JobError, match=next(iter(bad))) as raised:
        Sampling(**bad)  # type: ignore[arg-type]
    assert "expected" in str(raised.value)
    assert "\n" not in str(raised.value)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 20),
    st.floats(0.1, 3.0),
    st.sampled_from([0, 3, 20]),
    st.sampled_from([1.0, 0.9, 0.5]),
)
def test_a_drafter_with_the_targets_logits_foresees_the_draw(
    seed: int, index: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.sin(np.arange(50) * 1.7 + index % 13) * 4
    sampling = Sampling(temperature, top_k, top_p, seed)
    tokens, gaps = perturbed(logits, sampling, index, 8)
    drawn = choose(logits, sampling, index)
    kept = set(survivors(logits, sampling)[0].tolist())
    inside = [token for token in tokens if token in kept]
    assert not inside or inside[0] == drawn, "among what may be drawn the draw comes first"
    assert tokens[0] == drawn or top_k or top_p < 1
    assert list(gaps) == sorted(gaps, reverse=True)
    assert len(set(tokens)) == 8


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(1, 50),
)
def test_the_best_scores_are_those_of_a_full_sort_ties_included(
    scores: list[int], count: int
) -> None:
    ordered = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    assert _best(np.array(scores, np.float64), count).tolist() == ordered[:count]
