"""Choices from the best tokens only are those of the definitions in the core, ties included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.run.loud import loud
from flowspec.core.run.sampling import MAX_SEED, Sampling, choose, perturbed
from flowspec.model.sampling import choice as sampling_rows
from flowspec.model.sampling.choice import choose_rows, perturbed_rows, top_logprobs
from flowspec.model.sampling.logit_rows import BLOCK, LogitRows
from flowspec.model.sampling.noise import loud_at_once
from tests.marks import examples

LARGE = 151_936
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = st.one_of(
    st.integers(2, 40), st.sampled_from([BLOCK, BLOCK + 1, 3 * BLOCK]), st.integers(2, 5000)
)
TEMPERATURES = st.one_of(
    st.floats(0.2, 2.0), st.sampled_from([0.0, 1e-35, 1e-20, 1e-3, 50.0, 1e35])
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=TEMPERATURES,
    top_k=st.sampled_from([0, 0, 1, 2, 20, 70, 6000]),
    top_p=st.one_of(st.sampled_from([1.0, 0.9, 0.5, 1e-9]), st.floats(0.01, 0.9999)),
    seed=st.integers(0, MAX_SEED),
)


BY_DEFINITION = sampling_rows._by_definition


@pytest.fixture(autouse=True, scope="module")
def never_by_definition() -> Iterator[None]:
    """Few tokens are chosen from as many are on a GPU: the definition is what is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_rows, "_by_definition", lambda *_: False)
        yield


def random_logits(shape: str, rows: int, size: int, seed: int) -> torch.Tensor:
    """Rows of one of several shapes, ``[rows, size]``; every row has a finite logit."""
    random = np.random.default_rng(seed)
    table = random.normal(size=(rows, size)) * 3
    if shape == "tied":
        table = np.round(table / 2)
    elif shape == "flat":
        table[:] = 0.25
    elif shape == "peaked":
        table[np.arange(rows), random.integers(0, size, rows)] += 40
    elif shape == "excluded":
        table[random.random((rows, size)) < 0.9] = -np.inf
        table[np.arange(rows), random.integers(0, size, rows)] = 1.0
    return torch.from_numpy(table.astype(np.float32))


@st.composite
def tables(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from(["normal", "tied", "flat", "peaked", "excluded"]))
    logits = random_logits(
        shape, draw(st.integers(1, 4)), draw(SIZES), draw(st.integers(0, 1 << 20))
    )
    return logits.to(draw(st.sampled_from(DTYPES)))


def chosen_one_by_one(
    logits: torch.Tensor, sampling: Sampling, indices: Sequence[int]
) -> tuple[int, ...]:
    rows = logits.numpy() if logits.dtype == torch.float64 else logits.float().numpy()
    return tuple(choose(row, sampling, index) for row, index in zip(rows, indices, strict=True))


@settings(max_examples=examples(300), deadline=None)
@given(tables(), SAMPLINGS, st.integers(0, 1 << 40))
def test_every_row_gets_the_token_of_the_definition(
    logits: torch.Tensor, sampling: Sampling, first: int
) -> None:
    indices = [first + row // 2 for row in range(len(logits))]
    expected = chosen_one_by_one(logits, sampling, indices)
    assert choose_rows(logits, sampling, indices) == expected


@settings(max_examples=examples(300), deadline=None)
@given(tables(), SAMPLINGS, st.integers(0, 1 << 40), st.integers(1, 16))
def test_every_row_gets_the_coupled_draft_of_the_definition(
    logits: torch.Tensor, sampling: Sampling, first: int, count: int
) -> None:
    if sampling.temperature == 0:
        return
    indices = [first + row // 2 for row in range(len(logits))]
    expected = [
        perturbed(row, sampling, index, count)
        for row, index in zip(logits.float().numpy(), indices, strict=True)
    ]
    assert perturbed_rows(logits, sampling, indices, count) == expected


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_definition_itself_chooses_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    logits = random_logits("normal", 3, 50, 7).to(dtype)
    sampling = Sampling(0.7, seed=9)
    expected = chosen_one_by_one(logits, sampling, [4, 4, 5])
    drafts = perturbed_rows(logits, sampling, [4, 4, 5], 6)
    monkeypatch.setattr(sampling_rows, "_by_definition", BY_DEFINITION)
    monkeypatch.setattr(sampling_rows, "LogitRows", None)
    assert choose_rows(logits, sampling, [4, 4, 5]) == expected
    assert perturbed_rows(logits, sampling, [4, 4, 5], 6) == drafts
    many = random_logits("tied", 3, 2 * sampling_rows.SMALL_VOCABULARY, 7).to(dtype)
    best = tuple(many.double().numpy().argmax(1).tolist())
    assert choose_rows(many, Sampling(), [4, 4, 5]) == best


@settings(max_examples=examples(300), deadline=None)
@given(tables(), st.integers(1, 20))
def test_log_probabilities_are_those_of_the_best_tokens(logits: torch.Tensor, count: int) -> None:
    whole = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row, (tokens, values) in zip(whole, top_logprobs(logits, count), strict=True):
        ordered = np.argsort(-row, kind="stable")[:count]
        assert list(tokens) == ordered.tolist()
        assert np.allclose(values, row[ordered], rtol=1e-9, atol=1e-9)
        assert max(values) <= 0


@given(tables(), st.integers(1, 20), st.randoms())
def test_the_chosen_token_has_its_own_log_probability(
    logits: torch.Tensor, count: int, random: Random
) -> None:
    whole = torch.log_softmax(logits.double(), dim=-1).numpy()
    chosen = [random.randrange(logits.shape[1]) for _ in logits]
    plain = top_logprobs(logits, count)
    found = top_logprobs(logits, count, chosen)
    for row, token, (best, _), (tokens, values) in zip(whole, chosen, plain, found, strict=True):
        assert tokens == (best if token in best else (*best, token))
        assert np.allclose(values, row[list(tokens)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["normal", "tied", "flat", "peaked", "excluded"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, seed=3),
        Sampling(0.6, 20, 0.9, seed=4),
        Sampling(0.7, 0, 0.9, seed=5),
        Sampling(2.0, 5000, 1.0, seed=6),
    ],
    ids=str,
)
def test_a_large_vocabulary(sampling: Sampling, shape: str, dtype: torch.dtype) -> None:
    logits = random_logits(shape, 3, LARGE, 1).to(dtype)
    indices = [7, 8, 8]
    expected = chosen_one_by_one(logits, sampling, indices)
    assert choose_rows(logits, sampling, indices) == expected
    if sampling.temperature:
        drafts = perturbed_rows(logits, sampling, indices, 8)
        assert drafts[0] == perturbed(logits[0].float().numpy(), sampling, 7, 8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1), Sampling(0.8, 20, seed=1)])
def test_logits_that_are_no_numbers_choose_as_in_the_definition(
    sampling: Sampling, value: float
) -> None:
    logits = random_logits("normal", 2, 300, 2)
    logits[0, 100] = value
    logits[1, :] = value
    expected = chosen_one_by_one(logits, sampling, [4, 5])
    assert choose_rows(logits, sampling, [4, 5]) == expected


def test_logits_of_64_bits_choose_as_in_the_definition() -> None:
    """Scores of such logits may be equal where the logits are not."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 500)))
    sampling = Sampling(0.9, 7, 0.9, seed=1)
    expected = tuple(choose(row, sampling, 2) for row in logits.numpy())
    assert choose_rows(logits, sampling, [2, 2]) == expected


@given(st.integers(0, MAX_SEED), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4))
@settings(max_examples=examples(50), deadline=None)
def test_torchs_integers_find_the_same_loud_tokens(seed: int, indices: list[int]) -> None:
    """An accelerator hashes with signed integers, the processor with unsigned ones."""
    indices = [*indices, indices[0]]
    found = loud_at_once(seed, indices, 5000, torch.device("cpu"))
    for index, (ids, noise) in zip(indices, found, strict=True):
        expected = loud(seed, index, 5000)
        assert ids.tolist() == expected[0].tolist()
        assert noise.tolist() == expected[1].tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_an_accelerators_sums_are_those_of_the_processor(temperature: float) -> None:
    table = LogitRows(random_logits("excluded", 3, 5000, 1).bfloat16())
    there = table.masses_at_once(temperature)
    assert np.allclose(there, table.masses(temperature), rtol=1e-13, atol=0)


def test_only_blocks_that_reach_the_floor_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the device is a small part of the logits."""
    logits = random_logits("normal", 16, LARGE, 5)
    fetched = []
    take = LogitRows.take

    def counting(self: LogitRows, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        fetched.append(len(ids))
        return take(self, rows, ids)

    monkeypatch.setattr(LogitRows, "take", counting)
    choose_rows(logits, Sampling(0.6, 20, 0.9, seed=1), range(16))
    assert sum(fetched) < logits.numel() / 50
    fetched.clear()
    choose_rows(logits, Sampling(1.0, seed=1), range(16))
    assert sum(fetched) < logits.numel() / 10
