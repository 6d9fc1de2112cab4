"""``flowspec doctor``: lines or JSON, and status 1 for an error only."""

from __future__ import annotations

import json

import pytest

from flowspec.cli import doctor as module
from flowspec.doctor import examine
from flowspec.doctor.finding import error, note, ok
from flowspec.doctor.imports import Imported
from tests.cli.conftest import Command
from tests.commands import run


@pytest.fixture(autouse=True)
def torch_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "try_imports", lambda modules: Imported({}, "cpu", 1))


def test_each_finding_is_a_line_with_its_remedy(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [ok("a", "[fine]"), note("b", "so so", "do this"), error("c", "bad", "do that")]
    monkeypatch.setattr(module, "examine", lambda *_: iter(findings))
    status, out, err = command("doctor")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].split() == ["ok", "a", "[fine]"]
    assert [line.strip() for line in lines[1:5]] == [
        "note    b         so so",
        "-> do this",
        "error   c         bad",
        "-> do that",
    ]
    assert lines[5] == "1 error, 1 note"


def test_notes_are_no_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "examine", lambda *_: iter([note("b", "so so", "do this")]))
    assert command("doctor")[0] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dtype", "int3"), "--dtype 'int3' is unknown; expected one of auto, float32"),
        (("--device", "gpu"), "--device 'gpu' is unknown; expected auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_wrong_flags(command: Command, flags: tuple[str, str], said: str) -> None:
    status, out, err = command("doctor", *flags)
    assert (status, out) == (1, "")
    assert err.startswith(f"flowspec: {said}")


def test_all_of_it_on_this_machine() -> None:
    done = run("flowspec", "doctor", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(each) == {"subject", "found", "level", "remedy"} for each in found)
    assert done.returncode == 0, done.stdout + done.stderr
    subjects = {each["subject"] for each in found}
    assert subjects >= {"versions", "machine", "processor", "gpu", "ports", "broker", "target"}
