"""Options kept in a file: read back as written, and only on the conditions they were found on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.emulation.profiles import load as profile_of
from flowspec.errors import ConfigError
from flowspec.testbed.prompts import Prompt
from flowspec.testbed.tuning import Effort
from ops.bench.auto_tuning import EFFORT, Conditions, Found, load, save

PROFILE = profile_of("jetson-7b")
CONDITIONS = Conditions([Prompt("a", "Why?"), Prompt("b", "How?")], 8, ("chain",), [PROFILE])
FOUND = [
    Found("jetson-7b", 4, temperature, "head", "chain", "chain:window=3", 9, 2, {"chain": 0.1})
    for temperature in (0.0, 1.0)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Written with ``CONDITIONS``."""
    save(tmp_path / "tuned.json", CONDITIONS, EFFORT, FOUND)
    return tmp_path / "tuned.json"


def test_what_is_written_is_read_back(file: Path) -> None:
    assert load(file, CONDITIONS) == FOUND
    more = replace(
        CONDITIONS, profiles=[PROFILE, profile_of("wan-50ms")], strategies=("chain", "auto")
    )
    assert load(file, more) == FOUND  # what the file lacks is no contradiction


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(CONDITIONS, tokens=9), r"other tokens \(8; these are 9\)"),
        (replace(CONDITIONS, prompts=CONDITIONS.prompts[:1]), r"other prompts \(2 with digest"),
        (
            replace(CONDITIONS, profiles=[replace(PROFILE, speeds=(1.0, 2.0, 1.0, 1.0))]),
            "other times in profile jetson-7b",
        ),
    ],
)
def test_other_conditions_are_named_in_one_line(file: Path, changed: Conditions, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(file, changed)
    assert "\n" not in str(raised.value)


def _other_value(content: dict[str, Any]) -> None:
    content["searched"]["chain"]["values"]["window"] = ["1"]


def _other_effort(content: dict[str, Any]) -> None:
    content["effort"]["few"] = 99


@pytest.mark.parametrize(
    ("change", "said"),
    [(_other_value, "other searched values of chain"), (_other_effort, "other effort")],
)
def test_another_search_is_named(
    file: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        load(file, CONDITIONS)


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "flowspec bench"}', "{}"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="is no file of tuned options"):
        load(tmp_path / "x.json", CONDITIONS)


def test_a_file_that_grows_still_says_what_its_first_entries_depend_on(file: Path) -> None:
    more = replace(CONDITIONS, profiles=[profile_of("wan-50ms")], strategies=("auto",))
    save(file, more, EFFORT, FOUND)
    content = json.loads(file.read_text())
    assert content["profiles"].keys() == {"jetson-7b", "wan-50ms"}
    assert content["searched"].keys() == {"chain", "auto"}
    assert load(file, CONDITIONS) == FOUND


def test_the_effort_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "x.json", CONDITIONS, Effort(configurations=3), FOUND)
    assert json.loads((tmp_path / "x.json").read_text())["effort"]["configurations"] == 3
