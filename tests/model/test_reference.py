"""The oracle: equal to ``generate`` when greedy; it excuses only rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowspec.core.run.sampling import Sampling, gumbel
from flowspec.model.reference import NUCLEUS_TIE, Reference
from flowspec.model.weights.directory import ModelDirectory

Family = Callable[..., ModelDirectory]
PROMPT = (5, 6, 7, 8)


@pytest.fixture
def reference(family: Family) -> Reference:
    return Reference(family("llama"))


class Logits:
    """A float64 'model' that always returns one row."""

    def __init__(self, row: list[float]) -> None:
        self.row = torch.tensor(row, dtype=torch.float64)

    def __call__(self, input_ids: torch.Tensor) -> object:
        return type("Output", (), {"logits": self.row.expand(1, input_ids.shape[1], -1)})()


def excuse(
    reference: Reference, row: list[float], ours: int, theirs: int, sampling: Sampling
) -> float | None:
    reference._double = Logits(row)
    found = reference.excuse(PROMPT, ours, theirs, sampling)
    return found.gap if found else None


def test_loading_prints_nothing(family: Family, capfd: pytest.CaptureFixture[str]) -> None:
    """A table is being printed on the same terminal."""
    directory = family("llama")
    capfd.readouterr()  # the test itself writes it
    Reference(directory)
    assert capfd.readouterr() == ("", "")


def test_decoding_is_generate(reference: Reference, family: Family) -> None:
    expected = reference._model.generate(
        torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert reference.decode(PROMPT, 30, Sampling()) == tuple(expected[0, 4:].tolist())


def test_greedy_ties_are_excused_and_differences_are_not(reference: Reference) -> None:
    row = [1.0, 3.0, 3.0 - 5e-5, 2.0]
    assert excuse(reference, row, 1, 2, Sampling()) == pytest.approx(5e-5)
    assert excuse(reference, row, 1, 3, Sampling()) is None
    assert excuse(reference, [3.0, 1.0, 1.0], 1, 2, Sampling()) is None, (
        "a tie between losers explains nothing"
    )


def test_sampled_ties_count_the_noise(reference: Reference) -> None:
    sampling = Sampling(1.0, seed=4)
    noise = gumbel(4, len(PROMPT), [0, 1])
    row = [float(-noise[0]), float(-noise[1]) + 5e-5]
    assert excuse(reference, row, 0, 1, sampling) == pytest.approx(5e-5)
    assert excuse(reference, [float(-noise[0]), float(-noise[1]) + 0.1], 0, 1, sampling) is None


def test_the_edge_of_the_nucleus_is_excused(reference: Reference) -> None:
    row = list(np.log([0.5, 0.4, 0.1]))
    sampling = Sampling(1.0, top_p=0.9, seed=1)  # after two tokens exactly 0.9 is reached
    assert excuse(reference, row, 1, 2, sampling) == NUCLEUS_TIE
    assert (
        excuse(reference, list(np.log([0.6, 0.3, 0.1])), 1, 0, Sampling(1.0, top_p=0.5, seed=1))
        is None
    )
