"""A cluster file is what the pipeline becomes: its layers, its context, the same text."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flowspec.client import Client
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.plan.cluster_file import ClusterFile, ClusterStage, read_cluster, write_cluster
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.rehearse.probe import announced
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.commands import run, start
from tests.e2e.conftest import Run, one_line
from tests.waiting import until

pytestmark = pytest.mark.live

RANGES = (range(2), range(2, 11), range(11, 12))
PROMPT = "What is the sea?"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    stages = tuple(ClusterStage(f"box-{at}", layers, "float32") for at, layers in enumerate(RANGES))
    cluster = ClusterFile(*default_pair(), "box-0", 64, stages, LinkShape(0.0002, 125e6))
    file = tmp_path / "plan.toml"
    file.write_text(write_cluster(cluster))
    return file


@pytest.mark.heavy
def test_up_serves_the_layers_of_the_file(flowspec: Run, plan: Path, reference: Reference) -> None:
    up = flowspec("up", "--cluster", str(plan))
    assert up.returncode == 0, up
    url = up.stdout.split("'")[1]
    try:
        with Client(url) as client:
            record = client.pipeline()
            assert record["layers"] == "0-2 2-11 11-12"
            tokenizer = Tokenizer(open_directory(default_pair()[0]))
            expected = reference.generate(tokenizer.encode(PROMPT, raw=False), 12)
            found = client.submit(PROMPT, max_new_tokens=12).result()
            assert found.text == tokenizer.detokenizer.decode(list(expected))
            prompt = len(tokenizer.encode(PROMPT, raw=False))
            longest = client.submit(PROMPT, max_new_tokens=100).result()
            assert prompt + len(longest.token_ids) == 64
        shown = json.loads(flowspec("status", "--json").stdout)
        assert shown["pipeline"]["context"] == 64
    finally:
        assert flowspec("down").returncode == 0


def heavy(*values: object) -> Any:
    """A parameter of `make test-all` only: each starts a process."""
    return pytest.param(*values, marks=pytest.mark.heavy)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "0-5 5-11", "--stages", "2"], "expected all 12 layers of the model"),
        heavy(["--layers", "0-5 6-12", "--stages", "2"], "follow each other from 0 on"),
        heavy(["--layers", "0-12", "--stages", "2"], "as many ranges as stages, 2 of them"),
        heavy(["--context", "0"], "--context is 0; expected 1 to 1024"),
        heavy(["--jobs", "0"], "--jobs is 0; expected 1 or more"),
        (["--cluster", "/no/such.toml"], "cannot be read"),
        heavy(
            ["--cluster", "/no/such.toml", "--stages", "2", "--draft-dtype", "nf4"],
            "leave out --stages and --draft-dtype",
        ),
    ],
)
def test_a_scheduler_refuses_what_cannot_be(flags: list[str], message: str) -> None:
    done = run("workers.scheduler", *flags)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.heavy
def test_probed_boxes_are_planned(flowspec: Run, tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    with PrivateBroker() as broker:
        nobody = flowspec("plan", "--redis-url", broker.url, "--out", str(out))
        assert "start `python -m workers.probe --name NAME` on each" in one_line(nobody)
        words = ("workers.probe", "--redis-url", broker.url, "--name")
        with start(*words, "east") as east, start(*words, "west") as west:
            with closing(BrokerClient(broker.url)) as client:
                until(lambda: announced(client) == ["east", "west"])
            done = flowspec("plan", "--redis-url", broker.url, "--out", str(out))
            for probe in (east, west):
                probe.process.terminate()
            statuses = [probe.ended().returncode for probe in (east, west)]
    assert done.returncode == 0, done
    assert statuses == [0, 0]
    assert "Times are measured on 2 boxes" in done.stdout
    cluster = read_cluster(out)
    assert {stage.box for stage in cluster.stages} | {cluster.draft_box} <= {"east", "west"}


def test_a_scheduler_takes_the_file(plan: Path) -> None:
    with PrivateBroker() as broker:
        words = ("workers.scheduler", "--redis-url", broker.url, "--cluster", str(plan))
        with start(*words) as scheduler:
            with closing(RedisControl(broker.url, Keys())) as control:
                record = until(control.pipeline)
            scheduler.process.terminate()
            assert scheduler.ended().returncode == 0
    assert record["layers"] == "0-2 2-11 11-12"
    assert (record["stages"], record["context"], record["draft"]) == ("3", "64", default_pair()[1])
