"""Results files are what their commands print, and the page of conclusions links to all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from ops.bench import retake
from ops.bench.retake import ROOT, SIMULATED, parse, trimmed

RESULTS = ROOT / "ops" / "bench" / "results"
MEASURED = "Measured on a machine: differs from run to run."
HELLO = "python -c \"print('hello')\""


def written(file: Path, command: str, output: str, kind: str = SIMULATED) -> Path:
    """``file`` with one block more."""
    before = file.read_text(encoding="utf-8") + "\n" if file.exists() else ""
    file.write_text(f"{before}`$ {command}`\n\n{kind}\n\n{output}\n", encoding="utf-8")
    return file


def retaking(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int | str | None:
    """What the program exits with, None at its end."""
    monkeypatch.setattr(sys, "argv", ["retake", *map(str, words)])
    try:
        retake.main()
    except SystemExit as ended:
        return ended.code
    return None


def test_a_file_is_rewritten_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "two.md", HELLO, "stale")
    written(file, "echo; echo ' | two |  '; echo", "stale", MEASURED)
    assert retaking(monkeypatch, file) is None
    first, second = parse(file.read_text())
    assert (first.command, first.kind, first.output) == (HELLO, SIMULATED, ("hello",))
    assert second.output == (" | two |",)
    assert re.fullmatch(r"Measured on \d+ cores .+: differs from run to run\.", second.kind)
    assert file.read_text() == f"{first.text()}\n{second.text()}"


def test_a_check_of_an_equal_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "same.md", HELLO, "hello")
    before = file.read_text()
    assert retaking(monkeypatch, "--check", file) == 0
    assert capsys.readouterr().out == f"{file}: equal\n"
    assert file.read_text() == before


def test_a_check_prints_the_first_lines_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = written(tmp_path / "other.md", "seq 40", "1\n2\n4")
    same = written(tmp_path / "same.md", HELLO, "hello")
    before = other.read_text()
    assert retaking(monkeypatch, "--check", other, same) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{other}: `seq 40` prints something else:"
    assert "+3" in printed
    assert "-4" not in printed
    assert len(printed) == 1 + retake.SHOWN + 1
    assert printed[-1] == f"{same}: equal"
    assert other.read_text() == before


def test_a_measured_file_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "measured.md", f"touch {tmp_path / 'ran'}", "", MEASURED)
    said = retaking(monkeypatch, "--check", file)
    assert said == f"retake: {file} is measured, which differs from run to run: cannot check it"
    assert not (tmp_path / "ran").exists()


def test_the_folder_of_prompts_is_written_as_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prompt sets"
    folder.mkdir()
    file = written(tmp_path / "prompts.md", "echo DIR DIRECT", "")
    said = retaking(monkeypatch, file)
    assert said == "retake: `echo DIR DIRECT` needs prompt sets; give their folder with --prompts"
    assert retaking(monkeypatch, "--prompts", folder, file) is None
    assert parse(file.read_text())[0].output == ("DIR DIRECT",)


def test_a_failed_command_leaves_its_block_as_it_was_and_those_before_it_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(written(tmp_path / "bad.md", HELLO, "stale"), "exit 3", "stale")
    first, failing = parse(file.read_text())
    assert retaking(monkeypatch, file) == "retake: `exit 3` failed with exit status 3"
    taken, kept = parse(file.read_text())
    assert (first.output, taken.output) == (("stale",), ("hello",))
    assert kept == failing


def test_the_footer_of_a_report_is_left_out() -> None:
    footer = "`flowspec bench --tokens 8`, version 0.1.0, on 2 cores of a machine, torch 2."
    assert trimmed(["", "## x", "", footer]) == ("## x",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the first line is not a command"),
        ("# x\n\n`$ echo`\n", "the first line is not a command"),
        ("`$ echo`\n", "the third line of `echo` is ''"),
        ("`$ echo`\n\nSimulated.\n", "the third line of `echo` is 'Simulated.'"),
    ],
)
def test_what_is_no_results_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = retaking(monkeypatch, tmp_path / "none.md")
    assert isinstance(said, str)
    assert said == f"retake: {tmp_path / 'none.md'} cannot be read: No such file or directory"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.md")), ids=lambda file: file.stem)
def test_every_results_file_can_be_retaken(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    blocks = parse(text)
    assert text == "\n".join(block.text() for block in blocks)
    assert all(block.output for block in blocks)
    assert all(re.match(r"(python -m|flowspec|make) ", block.command) for block in blocks)
    for module in re.findall(r"python -m (ops\.bench\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    assert f"](results/{file.name})" in (RESULTS.parent / "RESULTS.md").read_text()
