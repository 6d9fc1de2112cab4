"""Arguments of ``simulate`` and ``bench``: draft sources, profiles, prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.rehearse.devices import profiles
from tests.cli.conftest import Command

LAPTOP = (Path(profiles.__file__).parent / "laptop-cpu.toml").read_text()


def test_a_source_is_refused_by_what_the_profile_has(command: Command, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        "".join(line for line in LAPTOP.splitlines(keepends=True) if not line.startswith("head = "))
    )
    unknown = command("bench", "--profile", str(own), "--draft", "slm,medusa")
    said = "profile own has no drafter 'medusa'; expected one of: slm, ngram"
    assert unknown == (1, "", f"flowspec: {said}\n")
    missing = command("simulate", "hi", "--profile", str(own), "--draft", "draft+head")
    assert missing == (
        1,
        "",
        "flowspec: profile own has no drafter 'head'; expected one of: slm, ngram\n",
    )


@pytest.mark.parametrize(
    ("entry", "place"),
    [("layer_ms", "target.layer_ms"), ("head_ms", "target.head_ms"), ("slm", "drafters.slm")],
)
@pytest.mark.parametrize(
    "value", ["{2 = 2.0, 4 = 1.0}", "{0 = 1.0}", "{1 = -1.0}", "{x = 1.0}", "3.5", "{}"]
)
def test_a_wrong_table_of_times_is_named(
    command: Command, tmp_path: Path, entry: str, place: str, value: str
) -> None:
    own = tmp_path / "own.toml"
    lines = [
        f"{entry} = {value}" if line.startswith(f"{entry} = ") else line
        for line in LAPTOP.splitlines()
    ]
    own.write_text("\n".join(lines))
    status, out, err = command("simulate", "hi", "--profile", str(own))
    assert (status, out) == (1, "")
    assert (
        err.startswith(f"flowspec: profile {own}: {place} is ")
        and "expected milliseconds by rows" in err
    )


def test_a_prompt_of_nothing_is_refused(command: Command, tmp_path: Path) -> None:
    assert "the prompt is empty" in command("simulate", " ")[2]
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "One?"}\n\n{"turns": [" ", "x"]}\n')
    for name in ("simulate", "bench", "generate"):
        status, out, err = command(name, "--prompts", str(file))
        assert (status, out) == (1, "")
        assert err.startswith(
            f"flowspec: {file}:3: the prompt is empty; give it at least one character"
        )
