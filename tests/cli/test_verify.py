"""``flowspec verify``: its report and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec.proof import library
from flowspec.proof import prove as verify
from flowspec.rehearse.compare.simulate import simulate_stages
from tests.cli.conftest import Command
from tests.precisions import FOUR_BITS

SHORT = ("verify", "--max-new-tokens", "4", "--stages", "2", "--strategy", "flowspec")


@pytest.fixture
def one_prompt(tmp_path: Path) -> str:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "Two and two are"}\n')
    return str(file)


def test_a_proof_that_holds(command: Command, one_prompt: str) -> None:
    status, out, _ = command(*SHORT, "--prompts", one_prompt, "--dtype", FOUR_BITS)
    assert status == 0
    assert f"{FOUR_BITS} on cpu by " in out
    assert "3 runs, 12 tokens: 0 differ, 0 near ties" in out
    assert "same model: " in out
    assert f"what {FOUR_BITS} costs" in out
    assert "drafts right, greedy" in out
    assert "in a row, by draft)" in out
    assert out.endswith("the proof holds: nothing is lost\n")


def test_a_proof_that_fails_has_status_1(
    command: Command, one_prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MOST_TIMES", 0.0)
    status, out, _ = command(*SHORT, "--prompts", one_prompt)
    assert status == 1
    assert "NOT the same model" in out
    assert out.endswith("the proof FAILS: the stages compute another model than the library\n")


def test_texts_that_differ_are_a_fault_of_the_pipeline(
    command: Command, one_prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*given: Any) -> Any:
        simulation, output = simulate_stages(*given)
        return simulation, (output[0] + 1, *output[1:])

    monkeypatch.setattr(verify, "simulate_stages", changed)
    status, out, _ = command(*SHORT, "--prompts", one_prompt)
    assert status == 1
    assert "same model: " in out
    assert "3 differ, 0 near ties" in out
    assert out.endswith("the proof FAILS: the pipeline changes texts\n")


def test_json(command: Command, one_prompt: str) -> None:
    status, out, _ = command(*SHORT, "--prompts", one_prompt, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["holds"] is True
    assert found["compared"] == 12
    assert [stage["precision"] for stage in found["facts"]] == ["float32", "float32"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--strategy", "none"), "none"),
        (("--dtype", "fp8"), "--dtype 'fp8' is unknown"),
        (("--stages", "0"), "--stages is 0; expected 1 to 64"),
        (("/nowhere",), "/nowhere does not exist"),
    ],
)
def test_wrong_flags_are_one_line(command: Command, flags: tuple[str, ...], said: str) -> None:
    status, out, err = command("verify", *flags)
    assert (status, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1
