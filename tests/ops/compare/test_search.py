"""The search over options: finds a valley's bottom, keeps to its budget and to what is fixed."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ConfigError
from flowspec.strategies import STRATEGIES, build, parse
from ops.compare.search import Space, search

NAMES = sorted(name for name, kind in STRATEGIES.items() if kind.search)


def places(space: Space, text: str) -> dict[str, int]:
    """The place of every searched option's value in its list."""
    _, options = parse(text)
    return {
        option: values.index(options.get(option, space.starts[0][option]))
        for option, values in space.values.items()
    }


@given(st.data())
def test_it_finds_the_best_values_where_each_option_has_one(data: st.DataObject) -> None:
    space = Space.of(data.draw(st.sampled_from(NAMES)))
    best = {
        option: data.draw(st.integers(0, len(values) - 1))
        for option, values in space.values.items()
    }

    def cost(text: str) -> float:
        return 1.0 + sum(abs(at - best[option]) for option, at in places(space, text).items())

    found = search(space, cost, 10_000)
    assert places(space, next(iter(found))) == best
    assert list(found.values()) == sorted(found.values())


@given(st.sampled_from(NAMES), st.integers(1, 60), st.randoms(use_true_random=False))
def test_it_evaluates_no_text_twice_and_no_more_than_it_may(
    name: str, most: int, dice: Random
) -> None:
    asked: list[str] = []

    def cost(text: str) -> float:
        asked.append(text)
        return math.inf if dice.random() < 0.2 else dice.random()

    found = search(Space.of(name), cost, most)
    assert len(asked) == len(set(asked)) == len(found) <= most
    assert asked[0] == name, "the default comes first"


@pytest.mark.parametrize(
    ("given_text", "fixed"),
    [("specpipe:width=7", "width=7"), ("chain:window=3,confidence=20", "window=3,confidence=20")],
)
def test_options_that_are_given_stay(given_text: str, fixed: str) -> None:
    space = Space.of(given_text)
    assert not set(space.values) & set(space.fixed)
    for text in search(space, lambda text: float(len(text)), 200):
        assert f"{text},".startswith(f"{space.name}:{fixed},")
        build(text, 4)


def test_a_text_without_changes_is_the_one_that_was_given() -> None:
    for text in ("specpipe", "specpipe:width=64,levels=2", "auto", "autoregressive"):
        space = Space.of(text)
        assert space.text(space.starts[0]) == text


def test_a_strategy_without_options_to_search_has_one_configuration() -> None:
    assert search(Space.of("autoregressive"), lambda _: 1.0, 40) == {"autoregressive": 1.0}


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown strategy 'fast'"):
        Space.of("fast")
