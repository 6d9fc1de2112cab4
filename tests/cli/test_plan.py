"""``flowspec plan --dry``: a plan from a configuration alone, and one line for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowspec.model.weights.directory import default_pair
from flowspec.plan.cluster_file import read_cluster
from tests import gguf_files
from tests.cli.conftest import Command

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def test_a_config_alone_is_planned(command: Command, model: str, tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    boxes = "slow:2x4GiB@20GB/s,fast:4GiB@100GB/s"
    status, said, err = command(
        "plan", model, "--dry", "--boxes", boxes, "--draft", "ngram", "--out", str(out)
    )
    assert (status, err) == (0, "")
    cluster = read_cluster(out)
    assert (cluster.model, cluster.draft, cluster.context) == (model, "ngram", 4096)
    assert cluster.layers[-1].stop == 8
    assert {stage.dtype for stage in cluster.stages} == {"float16"}
    assert re.search(
        r"^autoregressive +[\d.]+ ms per token +[\d.]+ tokens/s, simulated", said, re.M
    )
    assert re.search(r"^auto +[\d.]+ ms per token", said, re.M)
    assert "auto assumes the acceptance of the packaged drafters" in said
    assert f"wrote {out}; to start it" in said
    assert f"flowspec up --cluster {out}" in said
    for number, stage in enumerate(cluster.stages, start=1):
        assert f"{stage.box}: python -m workers.verify --stage {number}" in said


def test_a_cluster_file_may_be_used_from_any_folder(
    command: Command, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "cluster.toml"
    status, _, err = command(
        *("plan", Path(model).name, "--dry", "--boxes", "nano:2x8GiB@50GB/s"),
        *("--draft", "ngram", "--out", str(out)),
    )
    assert (status, err) == (0, "")
    assert read_cluster(out).model == model


def test_a_plan_says_that_it_takes_the_place_of_another(
    command: Command, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("mine")
    boxes = ("--boxes", "nano:2x8GiB@50GB/s", "--draft", "ngram", "--out", str(out))
    assert (
        f"wrote {out} in place of the one there was; " in command("plan", model, "--dry", *boxes)[1]
    )


def _besides_reading(err: str) -> list[str]:
    """The lines of ``err`` but the note that a GGUF file is read for the first time."""
    return [line for line in err.splitlines() if not line.startswith("note: reading config")]


def test_a_gguf_file_and_packaged_models_are_named_as_they_were(
    command: Command, tmp_path: Path
) -> None:
    """Not by the folders that they have on this machine alone."""
    file, out = tmp_path / "model.gguf", tmp_path / "cluster.toml"
    gguf_files.write(file)
    for model, draft in ((str(file), "draft:ngram"), ("target", "draft+ngram")):
        boxes = ("--dry", "--boxes", "box:8GiB@20GB/s", "--draft", draft, "--out", str(out))
        status, _, err = command("plan", model, *boxes)
        assert (status, _besides_reading(err)) == (0, [])
        assert (read_cluster(out).model, read_cluster(out).draft) == (model, draft)


def test_a_link_to_a_gguf_file_keeps_its_name(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the hub's cache, whose files have no suffix; folders of models' names are not meant."""
    file, link, out = tmp_path / "blob", tmp_path / "model.gguf", tmp_path / "cluster.toml"
    gguf_files.write(tmp_path / "whole.gguf")
    (tmp_path / "whole.gguf").rename(file)
    link.symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for folder in ("target", "ngram"):
        (tmp_path / folder).mkdir()
    boxes = ("--dry", "--boxes", "box:8GiB@20GB/s", "--out", str(out))
    for words, named in (
        ((str(link), "--draft", "ngram"), (str(link), "ngram")),
        ((), ("target", "draft")),
    ):
        status, _, err = command("plan", *words, *boxes)
        assert (status, _besides_reading(err)) == (0, [])
        assert (read_cluster(out).model, read_cluster(out).draft) == named


def test_fewer_boxes_are_told_where_they_are_faster(command: Command, tmp_path: Path) -> None:
    """Over slow links a second stage costs a hop, and a box for the draft gains nothing."""
    status, said, _ = command(
        *("plan", default_pair()[0], "--dry", "--boxes", "box:3x4GiB@1GB/s"),
        *("--draft", "ngram", "--strategy", "autoregressive"),
        *("--link-ms", "20", "--out", str(tmp_path / "cluster.toml")),
    )
    assert status == 0
    assert "1 box would be about as fast as 2: " in said
    assert "1 box would be faster than 3: " in said
    assert len(read_cluster(tmp_path / "cluster.toml").stages) == 1


def test_a_given_acceptance_is_used(command: Command, model: str, tmp_path: Path) -> None:
    found = []
    for acceptance in ("0.1", "0.95"):
        status, said, _ = command(
            *("plan", model, "--dry", "--boxes", "box:2x8GiB@20GB/s", "--draft", "draft"),
            *("--acceptance", acceptance, "--out", str(tmp_path / "cluster.toml")),
        )
        assert status == 0
        assert f"a drafted token is right with probability {acceptance}" in said
        row = re.search(r"^auto +([\d.]+) ms", said, re.M)
        assert row is not None
        found.append(float(row[1]))
    assert found[1] < 0.7 * found[0]


def test_this_machine_is_measured_and_split(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    status, said, err = command("plan", "--boxes", "local:2", "--context", "256", "--out", str(out))
    assert (status, err) == (0, "")
    assert said.startswith("Times are measured on this machine")
    cluster = read_cluster(out)
    assert (cluster.model, cluster.draft) == ("target", "draft")
    assert {stage.device for stage in cluster.stages} == {"cpu"}
    assert 0 < cluster.link.latency < 0.1


@pytest.mark.parametrize("boxes", ["local:0", "here", "nano:8GiB@50GB/s"])
def test_what_is_not_here_is_not_measured(command: Command, tmp_path: Path, boxes: str) -> None:
    out = str(tmp_path / "cluster.toml")
    status, said, err = command("plan", "--boxes", boxes, "--out", out)
    assert (status, said) == (1, "")
    assert "expected --boxes local:N, --redis-url of a broker" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--boxes", "a:1GiB@20GB/s"], "in float16 with a context of 4096 does not fit"),
        (["--boxes", "a:1GiB@20GB/s"], "the smallest possible stages need up to "),
        (["--boxes", "a:2GiB@20GB/s"], "more boxes like a"),
        (["--boxes", "a:5.5GiB@20GB/s"], "it would fit with a context of "),
        (["--boxes", "a:4GiB"], "with units, like nano:4x8GiB@50GB/s"),
        ([], "--dry needs --boxes; expected a name, memory"),
        (
            ["--boxes", "a:8GiB@20GB/s", "--context", "5000"],
            "--context is 5000; expected 1 to 4096",
        ),
        (["--boxes", "a:8GiB@20GB/s", "--dtype", "int7"], "--dtype 'int7' is unknown"),
        (["--boxes", "a:8GiB@20GB/s", "--acceptance", "2"], "--acceptance is 2.0; expected a prob"),
        (["--boxes", "a:8GiB@20GB/s", "--strategy", "magic"], "magic"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    command: Command, model: str, tmp_path: Path, flags: list[str], message: str
) -> None:
    out = tmp_path / "cluster.toml"
    status, said, err = command(
        "plan", model, "--dry", "--draft", "ngram", "--out", str(out), *flags
    )
    assert (status, said) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()
