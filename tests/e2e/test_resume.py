"""Processes are killed, paused and restarted in mid-job: the text is that of plain decoding."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from flowspec.broker.keys import Keys
from flowspec.broker.redis_control import RedisControl
from flowspec.client import Client, Job
from flowspec.cluster import Cluster, Setup
from flowspec.model.directory import default_pair

PROMPT = "Describe how to open a text file in Python."
COUNT = 160
STRATEGIES = ("autoregressive", "flowspec", "pipedec", "specpipe", "auto")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A pipeline of two stages whose processes are started again."""
    with Cluster(Setup(*default_pair(), 2)) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    wait_until(lambda: ready(cluster), 60)
    with Client(cluster.url) as found:
        yield found


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ready(cluster: Cluster) -> bool:
    """Whether every process that runs now serves its role."""
    with Client(cluster.url) as client:
        workers = client.workers()
    pids = {role: pid for role, pid in cluster.pids.items() if role != "broker"}
    return all(
        workers.get(role, {}).get("pid") == pid and workers[role]["state"] == "ready"
        for role, pid in pids.items()
    )


def begun(client: Client, strategy: str, temperature: float) -> Job:
    """A job in the middle of its output."""
    job = client.submit(
        PROMPT, max_new_tokens=COUNT, strategy=strategy, temperature=temperature, seed=3
    )
    ids = 0
    for chunk in job.stream():
        ids += len(chunk.token_ids)
        if ids >= 10:
            return job
    raise AssertionError("it has ended already")


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> dict[float, tuple[int, ...]]:
    """The text of plain decoding, by temperature."""
    with Client(cluster.url) as client:
        return {
            temperature: client.submit(
                PROMPT,
                max_new_tokens=COUNT,
                strategy="autoregressive",
                temperature=temperature,
                seed=3,
            )
            .result()
            .token_ids
            for temperature in (0.0, 1.0)
        }


@pytest.mark.parametrize("role", ["draft", "verify-1", "verify-2", "scheduler"])
def test_a_killed_process_changes_no_token(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]], role: str
) -> None:
    for at, strategy in enumerate(STRATEGIES if role == "verify-2" else STRATEGIES[1::2]):
        wait_until(lambda: ready(cluster), 60)
        temperature = float(at % 2)
        job = begun(client, strategy, temperature)
        before = cluster.pids[role]
        os.kill(before, signal.SIGKILL)
        result = job.result()
        assert result.token_ids == plain[temperature], strategy
        if role != "scheduler":
            assert 10 <= result.stats["resumed_tokens"] < COUNT
        wait_until(lambda was=before: cluster.pids[role] != was)  # type: ignore[misc]
        cluster._restarts[role]._stops.clear()  # the limit is for processes that do not work


@pytest.mark.parametrize("role", ["draft", "verify-1"])
def test_a_pause_beyond_the_lease_changes_no_token(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]], role: str
) -> None:
    job = begun(client, "flowspec", 1.0)
    pid = cluster.pids[role]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(9)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert job.result().token_ids == plain[1.0]
    wait_until(lambda: ready(cluster))
    assert cluster.pids[role] == pid, "it is not the end of the process"


def test_a_spare_takes_over_and_the_stage_that_comes_back_does_no_harm(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    command = ["-m", "workers.verify", "--spare", "--stage", "2", "--stage", "1"]
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": cluster.url}
    spare = subprocess.Popen(
        [sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert spare.stderr is not None
    pid = cluster.pids["verify-2"]
    try:
        assert "a spare of stage 2, stage 1" in spare.stderr.readline()
        job = begun(client, "flowspec", 0.0)
        os.kill(pid, signal.SIGSTOP)
        assert job.result().token_ids == plain[0.0]
        assert client.workers()["verify-2"]["pid"] == spare.pid
        os.kill(pid, signal.SIGCONT)
        for temperature in (0.0, 1.0):
            assert begun(client, "auto", temperature).result().token_ids == plain[temperature]
        assert client.workers()["verify-2"]["pid"] == spare.pid
    finally:
        with contextlib.suppress(ProcessLookupError):  # another has its role
            os.kill(pid, signal.SIGCONT)
        spare.send_signal(signal.SIGINT)
        spare.communicate(timeout=20)
    wait_until(lambda: ready(cluster), 60)


def test_a_rolling_restart_loses_no_job(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    jobs = [
        client.submit(PROMPT, max_new_tokens=COUNT, strategy=strategy, reuse=False)
        for strategy in ("flowspec", "autoregressive", "auto", "pipedec", "flowspec", "specpipe")
    ]
    for role in ("verify-1", "draft", "verify-2", "scheduler"):
        before = cluster.pids[role]
        os.kill(before, signal.SIGTERM)
        wait_until(lambda was=before, of=role: cluster.pids[of] != was, 60)  # type: ignore[misc]
        wait_until(lambda: ready(cluster), 60)
    for job in jobs:
        assert job.result().token_ids == plain[0.0]


def test_a_process_that_stops_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.restarts.BACK_OFF", (0.0,))
    monkeypatch.setattr("flowspec.restarts.MOST", 1)
    said: list[str] = []
    with Cluster(Setup(*default_pair(), 1), say=said.append) as doomed:
        before = 0
        for _ in range(2):
            wait_until(lambda was=before: doomed.pids["verify-1"] != was)  # type: ignore[misc]
            wait_until(lambda: ready(doomed), 60)
            before = doomed.pids["verify-1"]
            count = len(said)
            os.kill(before, signal.SIGKILL)
            wait_until(lambda known=count: len(said) > known)  # type: ignore[misc]
    assert said == [
        "verify-1 stopped with status -9: it printed nothing; it is started again",
        "verify-1 stopped with status -9: it printed nothing; it has stopped too often to be "
        "started again",
    ]


def test_the_broker_is_paused_for_five_seconds(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    """Nobody exits, and the job goes on."""
    pids = cluster.pids
    job = begun(client, "flowspec", 1.0)
    os.kill(pids["broker"], signal.SIGSTOP)
    time.sleep(5)
    os.kill(pids["broker"], signal.SIGCONT)
    began = time.monotonic()
    assert job.result().token_ids == plain[1.0]
    assert time.monotonic() - began < 20
    assert cluster.pids == pids
    control = RedisControl(cluster.url, Keys())
    wait_until(lambda: not control.running())
    control.close()
