"""The command makes the recordings that are checked in, and each the same at every making."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.drivers.replay import replay, replay_file
from ops import recordings


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


def test_real_workers_are_recorded(tmp_path: Path) -> None:
    recordings.main(["--only", recordings.LIVE, "--into", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    assert replay_file(file).tokens == replay_file(recordings.FOLDER / file.name).tokens
