"""What counts as a failure of a live test, and how failures are shown."""

from __future__ import annotations

import subprocess
from unittest.mock import Mock

import pytest

from ops import flakes

SUMMARY = """\
..R..F [100%]
=========================== short test summary info ============================
RERUN tests/e2e/test_a.py::test_one[a b]
FAILED tests/e2e/test_a.py::test_two - AssertionError: it - failed
ERROR tests/e2e/test_b.py::test_three
3 passed, 1 rerun in 3.00s
"""


def test_a_failure_counts_although_a_repetition_passed() -> None:
    assert flakes.failed_in(SUMMARY) == {
        "tests/e2e/test_a.py::test_one[a b]",
        "tests/e2e/test_a.py::test_two",
        "tests/e2e/test_b.py::test_three",
    }
    assert flakes.failed_in("3 passed in 3.00s") == set()


def test_every_other_run_is_beside_busy_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loops: list[Mock] = []

    def begin(*_: object) -> Mock:
        loops.append(Mock())
        return loops[-1]

    def run() -> str:
        running = [loop for loop in loops if not loop.kill.called]
        return "RERUN tests/x.py::test_x" if running else "1 passed"

    monkeypatch.setattr(subprocess, "Popen", begin)
    monkeypatch.setattr(flakes, "run_tests", run)
    assert flakes.main(["4"]) == 1
    assert len(loops) == 2 * flakes.BUSY_LOOPS and all(loop.kill.called for loop in loops)
    said = capsys.readouterr().out
    assert "run 1, alone: 0 failed\nrun 2, beside busy loops: 1 failed\n" in said
    assert said.endswith("   2 failures, 2 beside busy loops: tests/x.py::test_x\n")
    monkeypatch.setattr(flakes, "run_tests", lambda: "1 passed")
    assert flakes.main(["1"]) == 0
