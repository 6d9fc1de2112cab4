"""``flowspec shard``: what it writes, and one line for wrong flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.model.weights.manifest import read_manifest
from tests.cli.conftest import Command


def test_a_folder_for_each_stage_is_written(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    status, printed, err = command("shard", "target", "--layers", "0-5 5-12", "--out", str(out))
    assert status == 0
    assert printed.splitlines()[1:] == [
        f"  python -m workers.scheduler --target {out}/draft --stages 2 --layers '0-5 5-12'",
        f"  python -m workers.draft --target {out}/draft",
        f"  python -m workers.verify --stage 1 --target {out}/stage-1",
        f"  python -m workers.verify --stage 2 --target {out}/stage-2",
    ]
    first, *wrote = err.splitlines()
    assert re.fullmatch(rf"note: writing \d+\.\d MB of weights into {out}", first)
    assert [line.split(":")[0] for line in wrote] == [
        f"wrote {out / name}" for name in ("stage-1", "stage-2", "draft")
    ]
    manifests = [read_manifest(out / name) for name in ("stage-1", "stage-2", "draft")]
    assert [manifest and manifest.layers for manifest in manifests] == ["0-5", "5-12", ""]
    assert len({manifest and manifest.source for manifest in manifests}) == 1


def test_stages_and_precision_are_taken(command: Command, tmp_path: Path) -> None:
    flags = ("--stages", "3", "--dtype", "int8", "--head", "--out", str(tmp_path / "parts"))
    assert command("shard", "target", *flags)[0] == 0
    manifest = read_manifest(tmp_path / "parts" / "stage-3")
    assert manifest is not None
    assert (manifest.stage, manifest.stages, manifest.dtype) == (3, 3, "int8")
    assert (tmp_path / "parts" / "draft" / "model.safetensors").stat().st_size > 1e5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--stages", "2", "--layers", "0-12"), "leave out --stages"),
        (("--layers", "0-5"), "do not follow each other from 0 to 12"),
        (("--stages", "13"), "1 to 12 are possible"),
        (("--stages", "0"), "--stages is 0"),
        (("--dtype", "int3"), "dtype 'int3' is unknown"),
    ],
)
def test_wrong_flags_get_one_line(
    command: Command, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    status, out, err = command("shard", "target", *flags, "--out", str(tmp_path / "parts"))
    assert (status, out) == (1, "")
    assert said in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_cut_gets_one_line(command: Command, tmp_path: Path) -> None:
    status, _, err = command("shard", "head", "--stages", "1", "--out", str(tmp_path / "parts"))
    assert (status, err.count("\n")) == (1, 1)
    assert "can only draft" in err
