"""The compiler of a machine: used once, and one line where it is missing or fails."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowspec.model.kernels import compiled as module
from flowspec.model.kernels.compiled import compiled
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.kernels.integer import Integer
from flowspec.model.weights.quantise import quantise


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A new process of a user whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    compiled.cache_clear()
    yield tmp_path / "cache"
    compiled.cache_clear()


def test_it_is_compiled_once_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compiled()
    if isinstance(found, str):
        pytest.skip(found)
    assert capsys.readouterr().err == f"note: compiling the kernels into {cache}/flowspec/kernels\n"
    (made,) = cache.rglob("*.so")
    assert made.parent.stat().st_mode & 0o077 == 0
    assert {file.name for file in made.parent.iterdir()} == {made.name, "lock"}
    compiled.cache_clear()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert isinstance(compiled(), ctypes.CDLL)
    assert capsys.readouterr().err == ""


def test_one_that_was_cut_short_is_compiled_again(cache: Path) -> None:
    if isinstance(found := compiled(), str):
        pytest.skip(found)
    (made,) = cache.rglob("*.so")
    made.unlink()  # the one that is loaded must not change
    made.touch(0o700)
    compiled.cache_clear()
    assert isinstance(compiled(), ctypes.CDLL)


@pytest.mark.parametrize("which", ["folder", "file"])
def test_code_that_others_can_write_is_not_run(which: str, cache: Path) -> None:
    if isinstance(found := compiled(), str):
        pytest.skip(found)
    (made,) = cache.rglob("*.so")
    path = made.parent if which == "folder" else made
    path.chmod(0o770)
    compiled.cache_clear()
    assert Integer(4).missing() == (
        f"the compiled kernels cannot be kept or read: {path} can be written by other users; "
        "delete it"
    )


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Integer(4).missing() == "there is no C compiler: install gcc"


def test_a_compiler_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'a.c:1: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Integer(8).missing() == (
        f"{compiler} cannot compile the kernels: a.c:1: error: no such header"
    )
    assert not list(cache.rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiler))
    assert Integer(4).missing() == ("the compiled kernels cannot be kept or read: Not a directory")


def test_faster_instructions_change_no_bit(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """So all machines of a pipeline, and those that replay it, compute the same."""
    if not cpu_flags() >= module._FASTER.keys() or Integer(4).missing():
        pytest.skip("this CPU or its compiler lacks them")
    source = torch.Generator().manual_seed(1)
    rows = torch.randn((6, 192), generator=source)
    weights = []
    for outputs in (77, 69):  # an even and an odd number of shares of 8
        matrix = torch.randn((outputs, 192), generator=source)
        kinds = [quantise([matrix], matrix.shape, kind) for kind in ("int4", "int8", "int8-block")]
        assert kinds[0].scales is not None
        weights += [*kinds, replace(kinds[0], scales=kinds[0].scales.half())]

    def products() -> list[torch.Tensor]:
        compiled.cache_clear()
        return [
            Integer(weight.precision.bits)
            .pack(weight, torch.float32, torch.device("cpu"))
            .multiply(rows)
            for weight in weights
        ]

    slow = products()
    monkeypatch.setattr(module, "cpu_flags", cpu_flags)
    assert all(map(torch.equal, products(), slow))
    assert len(list(cache.rglob("*.so"))) == 2


def test_a_processor_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"sse2"}))
    assert Integer(4).missing() == "this is no x86 CPU with AVX2, FMA and F16C instructions"
