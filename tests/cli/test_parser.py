"""Refused before a command starts: repeated flags, numbers out of range, flags without effect."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from flowspec.cli.app import app
from flowspec.cli.parser import in_range, not_empty, or_standard_input, positive
from flowspec.errors import ConfigError
from tests.cli.conftest import Command

GROUP = typer.main.get_command(app)
#: Every flag with a value, and whether it may be repeated.
VALUED = [
    (name, flag, option.multiple)
    for name, found in GROUP.commands.items()  # type: ignore[attr-defined]
    for option in found.params
    if option.param_type_name == "option" and not option.is_flag and option.nargs == 1
    for flag in option.opts
]


@pytest.mark.parametrize(
    ("said", "prompt"),
    [(b"why\n", "why"), (b"two\nlines\n\n", "two\nlines\n"), ("größe".encode(), "größe")],
)
def test_a_dash_reads_the_prompt_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, said: bytes, prompt: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
    assert or_standard_input("-") == prompt
    assert or_standard_input("a - b") == "a - b"
    assert or_standard_input(None) is None
    with pytest.raises(ConfigError, match="the prompt is not UTF-8 text"):
        or_standard_input("\udce9")


@pytest.mark.parametrize("name", ["generate", "submit", "simulate"])
@pytest.mark.parametrize(
    ("said", "why"), [(b"", "but standard input is empty"), (b"\xff\xfe", "is not UTF-8 text")]
)
def test_standard_input_without_a_prompt_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, said: bytes, why: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
    status, out, err = command(name, "-")
    assert (status, out) == (1, "")
    assert err.startswith("flowspec: the prompt ") and why in err


def test_a_flag_given_twice_is_refused(command: Command) -> None:
    taken = []
    for at, (name, flag, multiple) in enumerate(VALUED):
        second = [f"{flag}=2"] if at % 2 else [flag, "2"]
        said = f"flowspec: {flag} is given 2 times; give it once; see `flowspec {name} --help`\n"
        if not multiple and command(name, flag, "1", *second) != (2, "", said):
            taken.append(f"{name} {flag}")
    assert taken == []


def test_flags_meant_to_be_repeated_are_taken(command: Command) -> None:
    assert {flag for _, flag, multiple in VALUED if multiple} == {
        "--strategies",
        "--strategy",
        "--sweep",
        "--cors-origin",
        "--allowed-host",
    }
    links = ("--sweep", "latency=1", "--sweep", "mbit=1")
    _, _, err = command(
        "bench", "--strategies", "auto", "--strategy", "chain", *links, "--profile", "nowhere"
    )
    assert "there is no profile 'nowhere'" in err


@pytest.mark.parametrize("beside", [["--stages", "3"], ["--tokens", "48"], ["--no-loops"]])
def test_nothing_stands_beside_compare(command: Command, beside: list[str]) -> None:
    status, out, err = command("bench", "--compare", "a", "b", *beside)
    assert (status, out) == (1, "")
    assert err == f"flowspec: --compare takes no {beside[0]}; leave out the one or the other\n"
    assert "a is no file written by" in command("bench", "--compare", "a", "b")[2]


#: The attributes of a flag that checks use.
FLAG: Any = SimpleNamespace(opts=["--some"])


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats())
def test_a_number_is_taken_in_its_range_only(low: float, high: float, value: float) -> None:
    check = in_range(low, high, "some")
    assert check(FLAG, None) is None  # not given
    if low <= value <= high:
        assert check(FLAG, value) == value
    else:
        with pytest.raises(ConfigError, match=r"^--some is .*; expected some"):
            check(FLAG, value)


@given(st.text(" \n\tx"))
def test_a_name_has_something_in_it(value: str) -> None:
    check = not_empty("some")
    assert check(FLAG, None) is None  # not given
    if "x" in value:
        assert check(FLAG, value) == value
    else:
        with pytest.raises(ConfigError, match=r"^--some is empty; expected some"):
            check(FLAG, value)


@given(st.integers())
def test_a_count_is_one_or_more(count: int) -> None:
    if count >= 1:
        assert positive(str(count)) == count
    else:
        with pytest.raises(ValueError):
            positive(str(count))
