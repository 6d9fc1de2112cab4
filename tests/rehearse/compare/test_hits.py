"""Models with given hit rates have these rates, independently of the pass, and nested."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part, Pass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.rehearse.compare.hits import HitDrafter, HitStage, Kind, geometric

VOCABULARY = 300
TEXT = tuple((at * 7919 + 11) % VOCABULARY for at in range(4000))
ROWS = len(TEXT) - 1
RUN = RunKey("job", 1)
SEQUENCES = {RUN.job: TEXT}


def part(tokens: tuple[int, ...]) -> Part:
    """``tokens`` as a chain from the start of the text; every row is answered."""
    rows = tuple(range(len(tokens)))
    return Part(RUN, 1, rows, tuple(range(-1, len(tokens) - 1)), rows, tokens, (), answers=rows)


def proposals(kinds: list[Kind], width: int, seed: int = 0, tokens: tuple[int, ...] = TEXT[:ROWS]):  # type: ignore[no-untyped-def]
    drafter = HitDrafter(SEQUENCES, kinds, VOCABULARY, seed=seed)
    drafter.allocate(RUN, len(tokens), Sampling(), Returns())
    return drafter.run(Draft(part(tokens), width))


def said(rate: float, seed: int = 0) -> tuple[int, ...]:
    stage = HitStage(SEQUENCES, rate, VOCABULARY, seed=seed)
    stage.allocate(RUN, ROWS, Sampling(), Returns())
    done, _ = stage.run(Pass((part(TEXT[:ROWS]),)), [None])
    return done.choices[0].tokens


@settings(max_examples=8, deadline=None)
@given(first=st.floats(0.3, 0.8), ratio=st.floats(0.05, 0.19), seed=st.integers(0, 1000))
def test_every_rank_is_right_at_its_rate(first: float, ratio: float, seed: int) -> None:
    rates = geometric(first, ratio)
    done = proposals([Kind(rates)], 4, seed)
    for rank in range(3):
        share = sum(row[rank] == TEXT[at + 1] for at, row in enumerate(done.tokens)) / ROWS
        assert share == pytest.approx(rates[rank], abs=4.5 * math.sqrt(rates[rank] / ROWS) + 1e-9)
    assert all(len(set(row)) == 4 for row in done.tokens)
    assert done.values[0] == pytest.approx([math.log(rate) for rate in rates[:4]])


def test_values_say_which_kind_a_node_is_of_and_hold_there() -> None:
    done = proposals([Kind((0.95,), 0.4), Kind((0.3, 0.2), 0.6)], 3)
    for value, share in ((math.log(0.95), 0.4), (math.log(0.3), 0.6)):
        rows = [at for at, values in enumerate(done.values) if values[0] == pytest.approx(value)]
        assert len(rows) / ROWS == pytest.approx(share, abs=0.04)
        right = sum(done.tokens[at][0] == TEXT[at + 1] for at in rows) / len(rows)
        assert right == pytest.approx(math.exp(value), abs=0.05)


def test_luck_belongs_to_a_position_and_not_to_the_width_or_the_pass() -> None:
    wide = proposals([Kind(geometric(0.6, 0.3))], 16)
    narrow = proposals([Kind(geometric(0.6, 0.3))], 2)
    assert [row[:2] for row in wide.tokens] == list(narrow.tokens)


def test_off_the_path_nothing_is_right_and_values_do_not_tell() -> None:
    wrong = ((TEXT[0] + 1) % VOCABULARY, *TEXT[1:400])
    done = proposals([Kind((0.9,))], 1, tokens=wrong)
    on_path = proposals([Kind((0.9,))], 1, tokens=TEXT[:400])
    assert set(done.values) == set(on_path.values)
    right = sum(row[0] == TEXT[at + 1] for at, row in enumerate(done.tokens))
    assert right < 20  # fails by chance in one of 300 cases


@given(low=st.floats(0.1, 0.9), more=st.floats(0, 0.1))
@settings(max_examples=8, deadline=None)
def test_hits_of_models_of_one_seed_are_nested(low: float, more: float) -> None:
    drafts = [row[0] for row in proposals([Kind((low,))], 1).tokens]
    middle = said(low + more)
    for at, (draft, better) in enumerate(zip(drafts, middle, strict=True)):
        assert better == TEXT[at + 1] or draft == better
    assert sum(token == TEXT[at + 1] for at, token in enumerate(middle)) / ROWS == pytest.approx(
        low + more, abs=0.04
    )


def test_what_is_no_rate_and_what_it_cannot_do_is_refused() -> None:
    for rates in ((), (0.2, 0.3), (0.9, 0.2), (-0.1,)):
        with pytest.raises(ConfigError, match="add up to at most 1"):
            Kind(rates)
    with pytest.raises(ConfigError, match="do not add up"):
        HitDrafter(SEQUENCES, [Kind((0.5,), 0.5)], VOCABULARY)
    with pytest.raises(ConfigError, match="0 to 1"):
        HitStage(SEQUENCES, 1.1, VOCABULARY)
    drafter = HitDrafter(SEQUENCES, [Kind((0.5,))], VOCABULARY)
    drafter.allocate(RUN, 4, Sampling(), Returns())
    with pytest.raises(StateError, match="temperature 0"):
        drafter.run(replace(Draft(part(TEXT[:4]), 2), coupled=True))
    with pytest.raises(StateError, match="tokens alone"):
        drafter.learn(RUN, (0,), None)  # type: ignore[arg-type]
