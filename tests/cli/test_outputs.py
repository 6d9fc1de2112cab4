"""Outputs: paths are checked before the work, no text is lost, and stdout's errors are named."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.cli.outputs import check_distinct, check_writable, linked, write
from flowspec.errors import ConfigError
from flowspec.model.weights.directory import default_pair
from tests.cli.conftest import Command


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


def test_what_is_no_regular_file_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, kind in (
            ("pipe", "a named pipe"),
            ("link", "a named pipe"),
            ("socket", "a socket"),
            ("loop", "a symbolic link that leads back to itself"),
        ):
            with pytest.raises(ConfigError) as raised:
                check_writable("--record", Path(name))
            said = f"--record is {name}, which is {kind}; expected a regular file or none"
            assert str(raised.value) == said
    assert Path("pipe").is_fifo() and Path("link").is_symlink()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "run.json"
    link = tmp_path / "link"
    link.symlink_to("folder/run.json")
    check_writable("--out", link)  # the file it leads to may still be missing
    write("--out", link, "text")
    check_writable("--out", link)
    assert (link.is_symlink(), file.read_text()) == (True, "text")
    assert (linked(link), linked(file)) == (file.resolve(), file)
    dangling = tmp_path / "dangling"
    dangling.symlink_to("no/such/file")
    with pytest.raises(ConfigError, match=f"but there is no folder {tmp_path.resolve()}/no/such;"):
        check_writable("--out", dangling)


def test_two_flags_for_one_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("new")
    Path("old").write_text("kept", encoding="utf-8")
    Path("hard").hardlink_to("old")
    for one, other in (("new", "./new"), ("new", "link"), ("old", "hard")):
        with pytest.raises(ConfigError) as raised:
            check_distinct({"--out": Path(one), "--markdown": Path(other)})
        said = f"--out and --markdown name the same file, {Path(other)}; name two files"
        assert str(raised.value) == said
    check_distinct({"--out": Path("new"), "--markdown": Path("old"), "--plots": None})


def no_space() -> None:
    """Let no file grow; a write to one fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategies"],
        ["simulate", "Why?", "--stages", "2", "--strategy", "chain", "--max-new-tokens", "8"],
        ["plan", default_pair()[0], "--dry", "--boxes", "box:2x4GiB@20GB/s", "--draft", "ngram"],
    ],
)
def test_a_terminal_of_80_columns_is_enough(
    arguments: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines break between words, and no table is wider."""
    for name, value in {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    status, said, _ = command(*arguments)
    assert status == 0
    assert max(map(len, said.splitlines())) <= 80
    assert len(said.splitlines()) > 3


@pytest.mark.parametrize("arguments", [["strategies"], ["strategies", "--json"], ["--help"]])
def test_a_stdout_that_cannot_be_written_gets_one_line(
    tmp_path: Path, arguments: list[str]
) -> None:
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "flowspec", *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=no_space,
        )
    said = "flowspec: standard output cannot be written: File too large\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_closed_stdout_gets_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flowspec", "strategies"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.close(1),
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("flowspec: standard output is closed")


def test_a_reader_that_has_enough_gets_no_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as out:  # noqa: PTH123, a descriptor
        done = subprocess.run(
            [sys.executable, "-m", "flowspec", "strategies"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_of_other_files_are_not_taken_for_those_of_stdout() -> None:
    program = (
        "from flowspec.cli.outputs import checked_stdout\n"
        "with checked_stdout():\n"
        "    raise OSError(28, 'No space left on device', '/other')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.startswith("Traceback") and "/other" in done.stderr


def test_text_is_utf_8_whatever_the_locale() -> None:
    """Arguments too; what is no text is shown, not refused."""
    program = (
        "import sys\n"
        "from flowspec.cli.outputs import checked_stdout\n"
        "from flowspec.cli.parser import or_standard_input\n"
        "with checked_stdout():\n"
        "    print(or_standard_input(sys.argv[1]), '\\u65e5 \\udce9')\n"
    )
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    said = subprocess.check_output(
        [sys.executable, "-c", program, "größe".encode()], env=os.environ | locale
    )
    assert said == "größe 日 \\udce9\n".encode()
