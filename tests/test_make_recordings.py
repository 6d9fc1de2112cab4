"""The command makes the recordings that are checked in, and each the same at every making."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flowspec.rehearse.replay import replay, replay_file
from tests import make_recordings as recordings


@pytest.mark.parametrize("name", ["flowspec-2-stages-T0", "static_tree-2-stages-T0"])
def test_the_command_makes_the_recordings_that_are_checked_in(name: str) -> None:
    made = recordings.record(recordings.RECORDINGS[name])
    assert made == (recordings.FOLDER / f"{name}.jsonl").read_text().splitlines()


def test_a_sampled_recording_is_the_same_at_every_making() -> None:
    wanted = recordings.RECORDINGS["chain-2-stages-T1"]
    made = recordings.record(wanted)
    assert made == recordings.record(wanted)
    assert len(replay(made).tokens) == wanted.tokens


def test_the_named_recordings_are_written(tmp_path: Path) -> None:
    recordings.main(["--only", "speculative", "--into", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    assert file.stem == "speculative-2-models-T0"
    assert replay_file(file).tokens


@pytest.mark.heavy
def test_real_workers_are_recorded(tmp_path: Path) -> None:
    recordings.main(["--only", recordings.LIVE, "--into", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    assert replay_file(file).tokens == replay_file(recordings.FOLDER / file.name).tokens


def test_a_name_that_no_recording_has_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        recordings.main(["--only", "nosuch", "--into", str(tmp_path)])
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--only: no recording's name contains 'nosuch'; expected a part of one of auto-2" in line
    assert [*tmp_path.iterdir()] == []


def test_a_live_run_that_fails_ends_the_program_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: tuple[str, ...], **_: object) -> None:
        raise subprocess.CalledProcessError(3, command)

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(
        SystemExit, match=rf"^recordings: {recordings.LIVE}: .*generate.* ended with status 3$"
    ):
        recordings.main(["--only", recordings.LIVE, "--into", str(tmp_path)])
