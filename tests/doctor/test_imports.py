"""Imports in another process: a module that raises, crashes or hangs is named, others are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.doctor.imports import Accelerator, read, try_imports


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the process of the imports can import."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    return tmp_path


def test_a_broken_module_does_not_hide_the_next(modules: Path) -> None:
    (modules / "raising.py").write_text("print('chatter')\nraise OSError('no lib\\nmore')")
    found = try_imports(["raising", "json", "nowhere_at_all"])
    assert set(found.broken) == {"raising", "nowhere_at_all"}
    assert found.broken["raising"] == "OSError: no lib"
    assert found.torch_build == ""


def test_a_module_may_write_any_bytes(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message in another encoding ended the examination with a traceback."""
    monkeypatch.setenv("LC_ALL", "C")
    (modules / "noisy.py").write_text("import os; os.write(1, b'\\xff\\xfe gr\\xc3\\xb6\\n')")
    assert try_imports(["noisy", "json"]).broken == {}


def test_a_module_that_ends_the_process_is_named(modules: Path) -> None:
    (modules / "crashing.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = try_imports(["json", "crashing", "re"])
    assert found.broken == {"crashing": "its import ended the process with status -11"}


def test_a_module_that_hangs_is_given_up(modules: Path) -> None:
    (modules / "hanging.py").write_text("import time; time.sleep(60)")
    found = try_imports(["json", "hanging"], seconds=2.0)
    assert found.broken == {"hanging": "its import did not end within 2 s"}


def test_torch_says_what_it_was_built_for() -> None:
    found = try_imports(["torch"])
    assert found.broken == {}
    assert found.torch_build
    assert found.torch_threads >= 1


def test_devices_are_read() -> None:
    device = ["H100", 80, 70, [9, 0]]
    line = json.dumps({"torch": {"build": "cuda 12.8", "threads": 4, "devices": [device]}})
    found = read(line, "")
    assert found.accelerators == (Accelerator("H100", 80, 70, (9, 0)),)
    assert (found.torch_build, found.torch_threads) == ("cuda 12.8", 4)
