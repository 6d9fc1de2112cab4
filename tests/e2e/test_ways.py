"""Rows straight into the next worker's inbox: the same text, visible links, one clear end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.run.sampling import Sampling
from flowspec.model.reference import Reference
from flowspec.model.weights.directory import default_pair
from flowspec.rehearse.replay import replay_file
from flowspec.strategies import EXACT
from tests.e2e.conftest import Note
from tests.e2e.test_equality import SAMPLED, Checker, rows
from tests.waiting import until

pytestmark = pytest.mark.live

#: A worker without an inbox, which sends through the broker, too.
MIXED = {"verify-2": ("--rows", "broker")}


@pytest.fixture(scope="module")
def checker(reference: Reference) -> Checker:
    return Checker(reference)


@pytest.fixture(scope="module")
def straight() -> Iterator[Cluster]:
    with Cluster(Setup(*default_pair(), 3, rows="straight")) as cluster:
        yield cluster


def links(client: Client) -> dict[str, str]:
    """By link, like ``verify-1 s2``, its way."""
    return {
        f"{role} {to}": link["way"]
        for role, facts in client.workers().items()
        for to, link in facts.get("links", {}).items()
    }


def all_straight(client: Client, count: int) -> bool:
    found = links(client)
    return len(found) == count and set(found.values()) == {"straight"}


def test_every_strategy_with_all_rows_straight(
    checker: Checker, straight: Cluster, record_property: Note
) -> None:
    with Client(straight.url) as client:
        until(lambda: all_straight(client, 4))
        assert "inbox" not in str(client.workers()), "its password is not shown"
        for at, strategy in enumerate((*EXACT, "flowspec:lockstep=on")):
            sampling = (Sampling(), SAMPLED[0], SAMPLED[-1])[at % 3]
            prompt = rows()[at % 24]["prompt"]
            checker.check(client, prompt, strategy, 12, sampling)
    checker.report(record_property)


@pytest.mark.heavy
def test_links_may_differ(checker: Checker, record_property: Note) -> None:
    setup = Setup(*default_pair(), 3, rows="straight")
    with Cluster(setup, more=MIXED) as cluster, Client(cluster.url) as client:
        through = dict.fromkeys(("verify-1 s2", "verify-2 s3"), "broker")
        straight = dict.fromkeys(("draft s1", "verify-3 d0"), "straight")
        until(lambda: links(client) == through | straight)
        for strategy in ("flowspec", "specpipe", "auto", "pipedec"):
            checker.check(client, rows()[4]["prompt"], strategy, 16, Sampling())
    checker.report(record_property)


def test_a_recording_of_straight_rows_replays(straight: Cluster, tmp_path: Path) -> None:
    with Client(straight.url) as client:
        until(lambda: all_straight(client, 4))
        job = client.submit("Count to ten.", max_new_tokens=24, record=True)
        text = job.result().token_ids
        lines = job.recording()
    file = tmp_path / "recording.jsonl"
    file.write_text("\n".join(lines) + "\n")
    assert replay_file(file).tokens == text


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def inbox_of(pid: int) -> int:
    """The process of a worker's own inbox server."""
    (found,) = [
        child
        for child in children(pid)
        if b"-server" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]
    ]
    return found


@pytest.mark.gate
def test_a_lost_inbox_changes_no_token_and_another_takes_its_place(checker: Checker) -> None:
    with Cluster(Setup(*default_pair(), 2, rows="straight")) as cluster:
        client = Client(cluster.url)
        until(lambda: all_straight(client, 3))
        pids = cluster.pids
        words = {"strategy": "autoregressive", "max_new_tokens": 400}
        wanted = client.submit("Tell me a long story.", **words).result().token_ids
        for role in ("verify-2", "draft"):
            job = client.submit("Tell me a long story.", **words, reuse=False)
            next(job.stream())
            os.kill(inbox_of(cluster.pids[role]), signal.SIGKILL)
            result = job.result()
            assert result.token_ids == wanted, role
            assert result.stats["resumed_tokens"] > 0, role
            until(lambda: all_straight(client, 3))
        checker.check(client, rows()[0]["prompt"], "flowspec", 16, Sampling())
        cluster.check()
        assert cluster.pids == pids, "no process has ended"
        client.close()
