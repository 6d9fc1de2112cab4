"""Loud tokens are those with much noise, found without computing any other's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.run.loud import QUIET, loud
from flowspec.core.run.sampling import MAX_SEED, gumbel
from tests.marks import examples


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, MAX_SEED), st.integers(0, 1 << 40), st.integers(1, 80_000))
def test_loud_tokens_are_those_with_much_noise(seed: int, index: int, size: int) -> None:
    ids, noise = loud(seed, index, size)
    every = gumbel(seed, index, np.arange(size))
    quiet = np.delete(every, ids)
    assert noise.tolist() == every[ids].tolist()
    assert (noise > QUIET - 2e-9).all()
    assert (quiet <= QUIET).all()


def test_one_token_in_150_is_loud() -> None:
    ids, _ = loud(1, 2, 1_000_000)
    assert 6_400 < len(ids) < 7_100  # five standard deviations around 6,715
    assert ids.tolist() == sorted(set(ids.tolist()))
