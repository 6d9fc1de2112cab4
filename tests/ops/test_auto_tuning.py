"""Options kept in a file: read back as written, and only on the conditions they were found on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.devices.profiles import load as profile_of
from ops.bench import auto_tuning
from ops.bench.auto_tuning import EFFORT, Conditions, Found, add, load, packaged_models
from ops.compare.tuning import Effort

RESULT = Path(auto_tuning.__file__).with_name("results") / "auto-tuned.json"
PROFILE = profile_of("jetson-7b")
CONDITIONS = Conditions(
    [Prompt("a", "Why?"), Prompt("b", "How?")], 8, 1, {"target": "01ab"}, ("chain",), [PROFILE]
)
FOUND = [
    Found("jetson-7b", 4, temperature, "head", "chain", "chain:window=3", 9, 2, {"chain": 0.1})
    for temperature in (0.0, 1.0)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Written with ``CONDITIONS``."""
    add(tmp_path / "tuned.json", CONDITIONS, EFFORT, FOUND)
    return tmp_path / "tuned.json"


def test_what_is_written_is_read_back(file: Path) -> None:
    assert load(file, CONDITIONS, EFFORT) == FOUND
    more = replace(
        CONDITIONS, profiles=[PROFILE, profile_of("wan-50ms")], strategies=("chain", "auto")
    )
    assert load(file, more, EFFORT) == FOUND  # what the file lacks is no contradiction


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(CONDITIONS, tokens=9), r"other tokens \(8; expected 9\)"),
        (replace(CONDITIONS, prompts=CONDITIONS.prompts[:1]), r"other prompts \(count 2, digest"),
        (replace(CONDITIONS, seed=2), r"other seed \(1; expected 2\)"),
        (
            replace(CONDITIONS, models={"target": "23cd"}),
            r"other models \(target 01ab; expected target 23cd\)",
        ),
        (
            replace(CONDITIONS, profiles=[replace(PROFILE, speeds=(1.0, 2.0, 1.0, 1.0))]),
            "other times in profile jetson-7b",
        ),
    ],
)
def test_other_conditions_are_named_in_one_line(file: Path, changed: Conditions, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(file, changed, EFFORT)
    assert "\n" not in str(raised.value)


def _other_value(content: dict[str, Any]) -> None:
    content["searched"]["chain"]["values"]["window"] = ["1"]


def _other_effort(content: dict[str, Any]) -> None:
    content["effort"]["few"] = 99


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_value, "other searched values of chain"),
        (
            _other_effort,
            r"other effort \(configurations 10, few 99, finalists 1; expected",
        ),
    ],
)
def test_another_search_is_named(
    file: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load(file, CONDITIONS, EFFORT)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"kind": "flowspec bench"}', "{}"),
        '{"kind": "flowspec auto tuned, warm"}',
        '{"kind": "flowspec auto tuned, warm", "tokens": 8, "found": []}',
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="is no file of tuned options"):
        load(tmp_path / "x.json", CONDITIONS, EFFORT)


@pytest.mark.parametrize("name", ["tokens", "models", "effort", "searched", "profiles", "found"])
@pytest.mark.parametrize("value", [None, 3, [3]])
def test_a_damaged_file_is_refused_in_one_line(file: Path, name: str, value: object) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) | {name: value}
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"was tuned with other|is no file of tuned options"):
        load(file, CONDITIONS, EFFORT)


def test_a_file_is_added_to_and_a_place_found_again_replaced(file: Path) -> None:
    again = replace(FOUND[1], found="chain:window=4")
    head = replace(FOUND[0], draft="slm")
    add(file, CONDITIONS, EFFORT, [again, head])
    assert load(file, CONDITIONS, EFFORT) == [FOUND[0], again, head]
    assert [*file.parent.iterdir()] == [file]


def test_the_kept_options_are_of_the_packaged_models() -> None:
    header = json.loads(RESULT.read_text())
    assert (header["models"], header["seed"]) == (packaged_models(), 1)


def test_a_file_that_grows_still_says_what_its_first_entries_depend_on(file: Path) -> None:
    more = replace(CONDITIONS, profiles=[profile_of("wan-50ms")], strategies=("auto",))
    add(file, more, EFFORT, FOUND)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["profiles"].keys() == {"jetson-7b", "wan-50ms"}
    assert content["searched"].keys() == {"chain", "auto"}
    assert load(file, CONDITIONS, EFFORT) == FOUND


def test_a_file_is_read_with_the_effort_it_was_written_with(tmp_path: Path) -> None:
    effort = Effort(configurations=3)
    add(tmp_path / "x.json", CONDITIONS, effort, FOUND)
    assert load(tmp_path / "x.json", CONDITIONS, effort) == FOUND
    with pytest.raises(ConfigError, match="other effort"):
        load(tmp_path / "x.json", CONDITIONS, EFFORT)
