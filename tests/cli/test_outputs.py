"""Output paths are checked before the work, and no text is lost if writing fails after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowspec.cli.outputs import check_writable, write
from flowspec.errors import ConfigError


def test_a_place_that_can_be_written_is_not_touched(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    check_writable("--out", kept)
    check_writable("--out", tmp_path / "new.json")
    assert kept.read_text() == "old"
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is a folder; name a file"),
        ("folder", "is a folder; name a file"),
        ("no/such/file", "but there is no folder"),
        ("kept.json/file", "but there is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_by_its_flag(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept.json").write_text("old")
    with pytest.raises(ConfigError, match=r"^--out is ") as raised:
        check_writable("--out", tmp_path / name)
    assert says in str(raised.value)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder nobody can write to")
def test_a_folder_that_takes_no_files_is_refused() -> None:
    """Also for root, which passes every permission check."""
    with pytest.raises(ConfigError, match="but /proc/self cannot be written"):
        check_writable("--out", Path("/proc/self/run.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_is_protected_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")
    file.chmod(0o400)
    with pytest.raises(ConfigError, match="which may not be written"):
        check_writable("--out", file)


def test_a_text_that_cannot_be_written_goes_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written: .*; its text is on stdout instead"):
        write("--out", tmp_path / "gone" / "run.json", "minutes of work\n")
    assert capsys.readouterr().out == "minutes of work\n"


def test_a_text_is_written(tmp_path: Path) -> None:
    write("--out", tmp_path / "run.json", "text")
    assert (tmp_path / "run.json").read_text() == "text"
