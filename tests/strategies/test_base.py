"""Parsing of strategy options: accepted values, and one clear line for any other."""

from __future__ import annotations

import dataclasses

import pytest

from flowspec.core.session.pacing import Timestep
from flowspec.errors import ConfigError
from flowspec.strategies import STRATEGIES, build, describe
from flowspec.strategies.base import read_params
from flowspec.strategies.specpipe import SpecPipe

#: Every option that accepts ``auto``.
AUTOMATIC = {
    ("auto", "rows"),
    ("auto", "in_flight"),
    ("pipedec", "groups"),
    ("pipedec_head", "groups"),
    ("specpipe", "width"),
    ("specpipe", "in_flight"),
    ("specpipe_db", "width"),
    ("specpipe_db", "in_flight"),
    ("chain", "in_flight"),
}
WHOLE = [
    (name, field.name)
    for name, kind in STRATEGIES.items()
    for field in dataclasses.fields(kind.Params)
    if type(field.default) is int
]


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        build(text, 3)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("name", "option"), WHOLE)
def test_auto_is_taken_where_it_is_documented_and_refused_elsewhere(name: str, option: str) -> None:
    kind = STRATEGIES[name].Params
    if (name, option) in AUTOMATIC:
        assert getattr(read_params(kind, {option: "auto"}), option) == 0
        for text in ("some", "0"):
            expected = f"option {option} is {text!r}; expected a whole number above 0 or auto"
            assert refused(f"{name}:{option}={text}") == f"strategy {expected}"
    else:
        message = refused(f"{name}:{option}=auto")
        assert message == f"strategy option {option} is 'auto'; expected a whole number"


def test_numbers_with_a_fraction_have_a_range_and_may_not_be_words() -> None:
    kind = STRATEGIES["auto"].Params
    assert read_params(kind, {"delay": "0.5"}) == kind(delay=0.5)
    assert read_params(kind, {"delay": "1"}) == kind(delay=1.0)
    assert refused("auto:delay=high") == "strategy option delay is 'high'; expected a number"
    for text in ("-0.1", "nan", "inf"):
        assert refused(f"auto:delay={text}").endswith("expected 0 to 100")


def test_auto_leaves_the_choice_to_the_strategy() -> None:
    for text in (
        "pipedec:groups=auto",
        "specpipe:in_flight=AUTO",
        "chain:in_flight=auto",
    ):
        assert build(text, 3).max_in_flight == 3
    paced = build("pipedec:groups=2", 3)
    assert paced.max_in_flight == 2
    assert isinstance(paced.pacing, Timestep)
    for text, tuned in (
        ("specpipe:width=auto", True),
        ("specpipe", False),
    ):
        strategy = build(text, 3)
        assert isinstance(strategy, SpecPipe)
        assert (strategy.tuner is not None) == tuned


def test_the_list_shows_auto_where_it_is_the_default() -> None:
    shown = {
        (entry.name, option)
        for entry in describe()
        for option, default in entry.options
        if default == "auto"
    }
    assert shown == AUTOMATIC - {("specpipe", "width"), ("specpipe_db", "width")}


def test_what_the_list_shows_is_taken_and_changes_nothing() -> None:
    for entry in describe():
        kind = STRATEGIES[entry.name].Params
        assert read_params(kind, dict(entry.options)) == kind()


@pytest.mark.parametrize("text", ["flowspec:width=8,width=9", "flowspec:width=8,nodes=9, width =8"])
def test_an_option_given_twice_is_refused(text: str) -> None:
    assert refused(text) == "strategy option width is given twice; give it once"


@pytest.mark.parametrize("text", ["specpipe:", "flowspec:,"])
def test_a_colon_without_an_option_is_refused(text: str) -> None:
    name = text.partition(":")[0]
    expected = f"strategy {text!r} ends without an option; write {name}:option=value"
    assert refused(text) == expected


@pytest.mark.parametrize("share", [0, 101])
def test_a_nucleus_is_a_share_in_percent(share: int) -> None:
    assert (
        refused(f"specpipe_lossy_nucleus:nucleus={share}")
        == f"strategy option nucleus is {share}; expected 1 to 100"
    )
    assert "children is 0" in refused("specpipe_lossy_nucleus:children=0")
    for taken in (1, 100):
        build(f"specpipe_lossy_nucleus:nucleus={taken}", 3)


@pytest.mark.parametrize("text", ["chain:window={}", "flowspec:merge={}", "chain:{}=1"])
def test_a_wrong_value_is_shown_whole_if_it_is_short_and_cut_if_it_is_long(text: str) -> None:
    assert f"'{'x' * 60}';" in refused(text.format("x" * 60))
    long = refused(text.format("x" * 3000))
    assert f"'{'x' * 60}'...;" in long and "x" * 61 not in long


def test_a_number_far_out_of_range_is_cut() -> None:
    assert len(refused(f"chain:window={'9' * 3000}")) < 120
