"""A pipeline whose machines hold their own shards only, and the lines that wrong ones get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flowspec.client import Client
from flowspec.model.reference import Reference
from flowspec.model.shards import ShardPlan, write_shards
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, layer_ranges, open_directory
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.commands import start
from tests.e2e.test_cluster import said, worker
from tests.waiting import until

pytestmark = pytest.mark.live

PROMPT = "Why is the sky blue?"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged target in two stages."""
    out = tmp_path_factory.mktemp("shards") / "out"
    target = open_directory(default_pair()[0])
    write_shards(target, ShardPlan(layer_ranges(target.layers, 2), head=True), out)
    return out


@pytest.fixture(scope="module")
def broker(shards: Path) -> Iterator[PrivateBroker]:
    """A broker with a scheduler of a pipeline in float32, which has no weights itself."""
    with PrivateBroker() as broker:
        flags = ["--target", str(shards / "draft"), "--draft", "head", "--dtype", "float32"]
        with start("workers.scheduler", "--stages", "2", *flags, environment=at(broker)):
            yield broker


def at(broker: PrivateBroker) -> dict[str, str]:
    return {**os.environ, "FLOWSPEC_REDIS_URL": broker.url}


def refused(broker: PrivateBroker, folder: Path, stage: int = 1) -> str:
    arguments = ("--stage", str(stage), "--target", str(folder))
    return said(worker("workers.verify", *arguments, url=broker.url))


def damaged(source: Path, folder: Path, name: str, at: int) -> Path:
    """A copy of a shard with one byte changed."""
    folder.mkdir()
    for file in source.iterdir():
        data = bytearray(file.read_bytes())
        if file.name == name:
            data[at] ^= 1
        (folder / file.name).write_bytes(data)
    return folder


@pytest.mark.heavy
def test_wrong_shards_get_one_line_before_anything_is_loaded(
    broker: PrivateBroker, shards: Path, tmp_path: Path
) -> None:
    assert "is stage 2 of 2 with layers" in refused(broker, shards / "stage-2")
    assert "is that of scheduler and draft worker" in refused(broker, shards / "draft")
    changed = damaged(shards / "stage-1", tmp_path / "changed", "model.safetensors", -50)
    assert f"{changed / 'model.safetensors'} was changed" in refused(broker, changed)
    draft = open_directory(default_pair()[1])
    plan = ShardPlan(layer_ranges(draft.layers, 2))
    write_shards(draft, plan, tmp_path / "other")
    assert "is not the one the pipeline was set up with" in refused(
        broker, tmp_path / "other" / "stage-1"
    )
    target = open_directory(default_pair()[0])
    write_shards(target, ShardPlan(layer_ranges(target.layers, 2), "int8"), tmp_path / "int8")
    assert "was written in int8, and float32 is asked for" in refused(
        broker, tmp_path / "int8" / "stage-1"
    )


@pytest.mark.heavy
def test_a_shard_of_the_same_model_with_other_values_is_refused(
    broker: PrivateBroker, tmp_path: Path
) -> None:
    """Such as one of a later training step: config and tensors' names are the same."""
    source = Path(default_pair()[0])
    copy = damaged(source, tmp_path / "copy", "model.safetensors", -50)
    target = open_directory(str(copy))
    write_shards(target, ShardPlan(layer_ranges(target.layers, 2)), tmp_path / "out")
    for folder in (copy, tmp_path / "out" / "stage-2"):
        line = refused(broker, folder, 2)
        assert "its weights in model.norm have other values" in line


def wait_until_ready(broker: PrivateBroker, roles: set[str]) -> None:
    control = RedisControl(broker.url, Keys())

    def ready() -> set[str]:
        claims = control.claims().items()
        return {role for role, claim in claims if claim.facts["state"] == "ready"}

    until(lambda: roles <= ready())
    control.close()


@pytest.mark.gate
def test_a_pipeline_of_shards_says_what_the_model_says(broker: PrivateBroker, shards: Path) -> None:
    workers = [
        ["workers.draft"],
        *(
            ["workers.verify", "--stage", str(stage), "--target", str(shards / f"stage-{stage}")]
            for stage in (1, 2)
        ),
    ]
    with ExitStack() as running:
        for words in workers:
            running.enter_context(start(*words, environment=at(broker)))
        wait_until_ready(broker, {"draft", "verify-1", "verify-2"})
        with Client(broker.url) as client:
            found = client.submit(PROMPT, max_new_tokens=24).result()
    target = open_directory(default_pair()[0])
    prompt = Tokenizer(target).encode(PROMPT, raw=False)
    assert list(found.token_ids) == list(Reference(target).generate(prompt, 24))
