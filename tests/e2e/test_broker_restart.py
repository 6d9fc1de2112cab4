"""The broker's process is killed, or full: nobody exits, and the next job is served."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flowspec.async_client import AsyncClient
from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.protocol.causes import JOB_LOST
from flowspec.errors import JobFailed
from flowspec.model.weights.directory import default_pair
from flowspec.transport.connections.connection import connect
from tests.e2e.test_resume import COUNT, PROMPT, begun, ready
from tests.waiting import until

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def persistent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("broker")
    with Cluster(Setup(*default_pair(), 2, persist=place)) as running:
        yield running


def plain(client: Client) -> tuple[int, ...]:
    job = client.submit(PROMPT, max_new_tokens=COUNT, strategy="autoregressive", seed=3)
    return job.result().token_ids


def kill_broker(cluster: Cluster) -> None:
    before = cluster.pids["broker"]
    os.kill(before, signal.SIGKILL)
    until(lambda: cluster.pids["broker"] != before)
    cluster._restarts["broker"]._stops.clear()  # the limit is for brokers that do not work


def others(cluster: Cluster) -> dict[str, int]:
    return {role: pid for role, pid in cluster.pids.items() if role != "broker"}


@pytest.mark.parametrize("strategy", [pytest.param("flowspec", marks=pytest.mark.gate), "auto"])
def test_with_its_data_running_and_waiting_jobs_go_on(persistent: Cluster, strategy: str) -> None:
    pids = others(persistent)
    with Client(persistent.url) as client:
        wanted = plain(client)
        until(lambda: ready(persistent))
        job = begun(client, strategy, 0.0)
        waiting = client.submit(PROMPT, max_new_tokens=COUNT, strategy=strategy)
        kill_broker(persistent)
        result = job.result()
        assert result.token_ids == wanted
        assert result.stats["resumed_tokens"] >= 10
        assert waiting.result().token_ids == wanted
    assert others(persistent) == pids, "a process has stopped"


def test_a_client_reads_on_where_it_was(persistent: Cluster) -> None:
    with Client(persistent.url) as client:
        wanted = plain(client)
        until(lambda: ready(persistent))
        job = client.submit(PROMPT, max_new_tokens=COUNT)
        ids: list[int] = []
        killed = threading.Timer(0.0, kill_broker, (persistent,))
        for chunk in job.stream():
            ids += chunk.token_ids
            if len(ids) > 20 and killed.ident is None:
                killed.start()
        killed.join()
        assert tuple(ids) == wanted


@pytest.mark.gate
def test_an_asynchronous_client_reads_on_where_it_was(persistent: Cluster) -> None:
    with Client(persistent.url) as client:
        wanted = plain(client)
    until(lambda: ready(persistent))

    async def use() -> tuple[int, ...]:
        ids: list[int] = []
        killed = threading.Timer(0.0, kill_broker, (persistent,))
        async with asyncio.timeout(60), AsyncClient(persistent.url) as client:
            job = await client.submit(PROMPT, max_new_tokens=COUNT)
            async for chunk in job.stream():
                ids += chunk.token_ids
                if len(ids) > 20 and killed.ident is None:
                    killed.start()
        killed.join()
        return tuple(ids)

    assert asyncio.run(use()) == wanted


@pytest.mark.parametrize("seconds", [3.0, 12.0])
def test_jobs_outlive_a_full_broker(persistent: Cluster, seconds: float) -> None:
    """For longer than workers wait for it, too: then they take their roles again."""
    pids = others(persistent)
    with Client(persistent.url) as client, closing(connect(persistent.url)) as admin:
        wanted = plain(client)
        until(lambda: ready(persistent))
        before = str(admin.config_get("maxmemory")["maxmemory"])
        job = begun(client, "flowspec", 0.0)
        admin.config_set("maxmemory", 1)
        room = threading.Timer(seconds, admin.config_set, ("maxmemory", before))
        room.start()
        assert job.result().token_ids == wanted
        room.join()
        until(lambda: ready(persistent))
        assert client.submit(PROMPT, max_new_tokens=COUNT).result().token_ids == wanted
    assert others(persistent) == pids, "a process has stopped"


@pytest.mark.gate
def test_without_its_data_jobs_are_lost_in_time_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowspec.async_client.SILENCE_SECONDS", 2.0)
    said: list[str] = []
    with (
        Cluster(Setup(*default_pair(), 2), say=said.append) as cluster,
        Client(cluster.url) as client,
    ):
        wanted = plain(client)
        pids = others(cluster)
        job = begun(client, "flowspec", 0.0)
        waiting = client.submit(PROMPT, max_new_tokens=COUNT)
        until(lambda: client.knows(waiting.id))  # the scheduler holds what it has just read
        kill_broker(cluster)
        for lost in (job, waiting):
            with pytest.raises(JobFailed, match=f"there is no job {lost.id}: ") as raised:
                lost.result()
            assert raised.value.cause == JOB_LOST
        assert client.submit(PROMPT, max_new_tokens=COUNT).result().token_ids == wanted
        assert others(cluster) == pids, "a process has stopped"
        assert said[0].startswith("the private broker stopped with status -9")


def test_data_are_there_for_the_next_pipeline_and_for_one_at_a_time(tmp_path: Path) -> None:
    setup = Setup(*default_pair(), 1, persist=tmp_path / "data")
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        job = client.submit(PROMPT, max_new_tokens=5)
        text = job.result().text
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        assert client.job(job.id).result().text == text
        assert client.submit(PROMPT, max_new_tokens=5).result().text == text
