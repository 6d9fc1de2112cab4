"""Log-probabilities: what a stage returned is checked, and what the output says is what it was."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.logprobs import (
    LEAST,
    ScoredToken,
    TokenLogprobs,
    TokenWritten,
    asked_pairs,
    check_pairs,
    logprobs_text,
    read_logprobs,
    scored,
)
from flowspec.errors import ProtocolError

PAIRS = ((7, -0.1), (3, -2.5), (9, -7.0))

tokens = st.builds(
    ScoredToken,
    st.integers(0, 1 << 20),
    st.floats(-1e4, 0),
    st.builds(TokenWritten, st.binary(max_size=8), st.booleans()),
)


@given(st.lists(st.builds(TokenLogprobs, tokens, st.lists(tokens).map(tuple))))
def test_the_output_is_read_as_it_was_written(found: list[TokenLogprobs]) -> None:
    assert read_logprobs(logprobs_text(found)) == tuple(found)


def test_a_job_that_asks_for_no_alternatives_needs_a_pair() -> None:
    assert [asked_pairs(count) for count in (None, 0, 1, 20)] == [0, 1, 1, 20]


@pytest.mark.parametrize(("token", "rank"), [(7, 0), (9, 2)])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_chosen_token_is_found_whether_or_not_it_is_among_the_best(
    token: int, rank: int, count: int
) -> None:
    found = scored(token, PAIRS, count, lambda one: TokenWritten(str(one).encode()))
    assert (found.chosen.id, found.chosen.logprob) == PAIRS[rank]
    assert [one.id for one in found.top] == [7, 3, 9][:count]
    assert found.chosen.written.data == str(token).encode()


def test_no_chance_at_all_is_a_number() -> None:
    found = scored(3, ((7, 0.0), (3, -math.inf)), 1, lambda one: TokenWritten(b""))
    assert found.chosen.logprob == LEAST


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        ((7, -0.1),),
        ((7, -0.1), (3, -1.0)),  # without the chosen one
        ((9, -0.1), (9, -0.1)),
        ((9, -0.1), (100, -1.0)),
        ((9, -0.1), (-1, -1.0)),
        ((9, -0.1), (3, 0.5)),
        ((9, -0.1), (3, math.nan)),
        ((9, -0.1), (3, -1.0), (4, -2.0), (5, -3.0)),
    ],
)
def test_what_was_not_asked_for_is_refused(pairs: tuple[tuple[int, float], ...]) -> None:
    check_pairs((9,), (PAIRS,), 2, 100)
    with pytest.raises(ProtocolError, match="log-probabilit"):
        check_pairs((9,), (pairs,), 2, 100)
    with pytest.raises(ProtocolError, match="lacks the log-probabilities"):
        check_pairs((9,), (), 2, 100)


def test_a_small_vocabulary_has_fewer_pairs() -> None:
    check_pairs((1,), (((1, -0.1), (0, -2.0)),), 20, 2)
