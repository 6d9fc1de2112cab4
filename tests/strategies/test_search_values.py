"""The values that tuning tries: all are accepted, and known good points are among them."""

from __future__ import annotations

import dataclasses

import pytest

from flowspec.strategies import STRATEGIES, build, parse
from flowspec.strategies.base import default_text

SEARCHED = [(name, option) for name, kind in STRATEGIES.items() for option in kind.search]
#: Fast points found by hand on packaged profiles.
KNOWN = [
    "specpipe:width=32,levels=3",
    "specpipe:levels=2,in_flight=8",
    "specpipe:levels=3,width=21",
    "specpipe:width=1",
]


@pytest.mark.parametrize(("name", "option"), SEARCHED)
def test_a_searched_option_has_distinct_valid_values_with_the_default_among_them(
    name: str, option: str
) -> None:
    kind = STRATEGIES[name]
    values = kind.search[option]
    (field,) = (field for field in dataclasses.fields(kind.Params) if field.name == option)
    assert default_text(field) in values
    assert len(set(values)) == len(values)
    for value in values:
        build(f"{name}:{option}={value}", 4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_starting_point_is_valid_and_consists_of_searched_values(name: str) -> None:
    kind = STRATEGIES[name]
    for start in kind.starts:
        build(f"{name}:{start}", 4)
        _, options = parse(f"{name}:{start}")
        assert options
        assert all(value in kind.search[option] for option, value in options.items())


@pytest.mark.parametrize("text", KNOWN)
def test_points_found_by_hand_can_be_found(text: str) -> None:
    name, options = parse(text)
    assert all(value in STRATEGIES[name].search[option] for option, value in options.items())
