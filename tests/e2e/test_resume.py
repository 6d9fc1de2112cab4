"""Processes are killed, paused and restarted in mid-job: the text is that of plain decoding."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from flowspec.client import Client, Job
from flowspec.cluster import Cluster, Setup
from flowspec.core.protocol.causes import JOB_LOST
from flowspec.errors import FlowSpecError, JobFailed, JobTimeout
from flowspec.model.weights.directory import default_pair
from flowspec.start import forks
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.commands import Command, start
from tests.waiting import until

pytestmark = pytest.mark.live

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
    until(lambda: ready(cluster))
    with Client(cluster.url) as found:
        yield found


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


@pytest.mark.skipif(not forks.can_fork(), reason="no fork server here")
def test_a_killed_fork_server_takes_all_workers_with_it_and_changes_no_token(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    job = begun(client, "flowspec", 1.0)
    before = cluster.pids
    for server in forks._servers.values():
        if not server.is_gone:
            os.kill(server._process.pid, signal.SIGKILL)
    until(lambda: cluster.pids != before or not cluster.report())
    assert cluster.report(), "what it stands for would end"
    assert job.result(timeout=60.0).token_ids == plain[1.0]


@pytest.mark.gate
@pytest.mark.parametrize("role", ["draft", "verify-1", "verify-2", "scheduler"])
def test_a_killed_process_changes_no_token(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]], role: str
) -> None:
    check_killed(cluster, client, plain, role, STRATEGIES[1::2])


def test_a_killed_stage_changes_no_token_of_other_strategies(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    check_killed(cluster, client, plain, "verify-2", STRATEGIES[::2])


def check_killed(
    cluster: Cluster,
    client: Client,
    plain: dict[float, tuple[int, ...]],
    role: str,
    strategies: Sequence[str],
) -> None:
    for at, strategy in enumerate(strategies):
        until(lambda: ready(cluster))
        temperature = float(at % 2)
        job = begun(client, strategy, temperature)
        before = cluster.pids[role]
        os.kill(before, signal.SIGKILL)
        result = job.result()
        assert result.token_ids == plain[temperature], strategy
        if role != "scheduler":
            assert 10 <= result.stats["resumed_tokens"] < COUNT
        until(lambda was=before: cluster.pids[role] != was)  # type: ignore[misc]
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
    until(lambda: ready(cluster))
    assert cluster.pids[role] == pid, "it is not the end of the process"


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # another has its role
        os.kill(pid, signal.SIGCONT)


@pytest.mark.gate
def test_a_spare_takes_over_from_a_worker_that_leaves(plain: dict[float, tuple[int, ...]]) -> None:
    with PrivateBroker() as broker, contextlib.ExitStack() as running:

        def begin(*words: str) -> Command:
            environment = {**os.environ, "FLOWSPEC_REDIS_URL": broker.url}
            return running.enter_context(start(*words, environment=environment))

        begin("workers.scheduler", "--stages", "2")
        stages = [begin("workers.verify", "--stage", str(stage)) for stage in (1, 2)]
        begin("workers.draft")
        client = running.enter_context(Client(broker.url))
        until(lambda: served(client) >= {"draft", "verify-1", "verify-2"})
        spare = begin("workers.verify", "--spare", "--stage", "2", "--stage", "1")
        until(lambda: "ready: a spare of stage 2 and stage 1" in spare.err)
        until(lambda: [known["pid"] for known in client.spares()] == [spare.process.pid])
        job = begun(client, "flowspec", 0.0)
        stages[1].process.terminate()
        assert job.result().token_ids == plain[0.0]
        done = stages[1].ended()
        assert done.returncode == 0
        assert "note: asked to end: jobs that run here have 30 s, then" in done.stderr
        until(lambda: client.workers().get("verify-2", {}).get("pid") == spare.process.pid)
        until(lambda: "note: it is no spare of stage 1 until it is started again" in spare.err)
        assert begun(client, "flowspec", 1.0).result().token_ids == plain[1.0]
        until(lambda: not client.spares())


def served(client: Client) -> set[str]:
    """Roles whose worker is ready."""
    return {role for role, known in client.workers().items() if known["state"] == "ready"}


def test_a_spare_takes_over_and_the_stage_that_comes_back_does_no_harm(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    words = ("workers.verify", "--spare", "--stage", "2", "--stage", "1")
    environment = {**os.environ, "FLOWSPEC_REDIS_URL": cluster.url}
    pid = cluster.pids["verify-2"]
    with start(*words, environment=environment) as spare, contextlib.ExitStack() as ended:
        ended.callback(resume, pid)
        until(lambda: "ready: a spare of stage 2 and stage 1" in spare.err)
        job = begun(client, "flowspec", 0.0)
        os.kill(pid, signal.SIGSTOP)
        assert job.result().token_ids == plain[0.0]
        assert client.workers()["verify-2"]["pid"] == spare.process.pid
        resume(pid)
        for temperature in (0.0, 1.0):
            assert begun(client, "auto", temperature).result().token_ids == plain[temperature]
        assert client.workers()["verify-2"]["pid"] == spare.process.pid
        spare.process.send_signal(signal.SIGINT)
        spare.ended()
    until(lambda: ready(cluster))


@pytest.mark.gate
def test_a_rolling_restart_loses_no_job(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    jobs = [
        client.submit(PROMPT, max_new_tokens=COUNT, strategy=strategy, reuse=False)
        for strategy in ("flowspec", "autoregressive", "auto", "specpipe")
    ]
    for role in ("verify-2", "draft", "scheduler"):
        before = cluster.pids[role]
        os.kill(before, signal.SIGTERM)
        until(lambda was=before, of=role: cluster.pids[of] != was)  # type: ignore[misc]
        until(lambda: ready(cluster))
    for job in jobs:
        assert job.result().token_ids == plain[0.0]


def test_a_process_that_stops_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.restarts.BACK_OFF", (0.0,))
    monkeypatch.setattr("flowspec.restarts.MOST", 1)
    said: list[str] = []
    with Cluster(Setup(*default_pair(), 1), say=said.append) as doomed:
        before = 0
        for _ in range(2):
            until(lambda was=before: doomed.pids["verify-1"] != was)  # type: ignore[misc]
            until(lambda: ready(doomed))
            before = doomed.pids["verify-1"]
            count = len(said)
            os.kill(before, signal.SIGKILL)
            until(lambda known=count: len(said) > known)  # type: ignore[misc]
    assert said == [
        "verify-1 stopped with status -9: it printed nothing; it is started again",
        "verify-1 stopped with status -9: it printed nothing; it has stopped too often to be "
        "started again",
    ]


def test_a_process_of_which_nothing_runs_any_more_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch, plain: dict[float, tuple[int, ...]]
) -> None:
    """A thread of it that keeps the interpreter's lock stops the others, its lease's among them."""
    monkeypatch.setattr("flowspec.cluster._HUNG_LOOKS", 2)
    monkeypatch.setattr("flowspec.cluster._ROLES_SECONDS", 0.2)
    said: list[str] = []
    with Cluster(Setup(*default_pair(), 2), say=said.append) as cluster:
        until(lambda: "verify-1" in cluster._without)
        with Client(cluster.url) as client:
            job = begun(client, "flowspec", 0.0)
            before = cluster.pids["verify-1"]
            os.kill(before, signal.SIGSTOP)
            until(lambda: cluster.pids["verify-1"] != before)
            assert job.result().token_ids == plain[0.0]
    assert said == [
        "verify-1 has lost its role and does not answer: it is killed",
        "verify-1 stopped with status -9: it printed nothing; it is started again",
    ]


#: Keys of a pipeline and of the job that runs, without their tag.
KEYS = (
    *("pipeline", "queue", "running", "generations", "job", "request", "run", "out", "rows:s2"),
    "submissions",
    *("log:scheduler", "log:d0", "log:s1", "claim:scheduler", "claim:draft", "claim:verify-2"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] * (name == "log:s1")) for name in KEYS]
)
def test_a_key_of_a_wrong_type_stops_nothing(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]], name: str
) -> None:
    """The job ends as it should or with one line, and the next one is served without hands."""
    job = begun(client, "flowspec", 0.0)
    key = f"{Keys().tag}:" + {
        "job": f"job:{job.id}",
        "run": f"run:{job.id}:1",
        "out": f"out:{job.id}",
        "request": f"request:{job.id}",
    }.get(name, name)
    with contextlib.closing(connect(cluster.url)) as broker, broker.pipeline() as changes:
        changes.delete(key)  # at once: a worker would make it anew meanwhile
        changes.zadd(key, {"x": 1.0})
        changes.execute()
    try:
        assert job.result(timeout=60.0).token_ids == plain[0.0]
    except FlowSpecError as error:
        assert not isinstance(error, JobTimeout)
        assert "\n" not in str(error)
    again = client.submit(PROMPT, max_new_tokens=COUNT, strategy="flowspec", seed=3)
    assert again.result(timeout=60.0).token_ids == plain[0.0]
    for restart in cluster._restarts.values():
        restart._stops.clear()


@pytest.mark.gate
def test_a_broker_that_is_emptied_serves_the_next_job(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    job = begun(client, "flowspec", 0.0)
    with contextlib.closing(connect(cluster.url)) as broker:
        broker.flushall()
    with pytest.raises(JobFailed) as found:
        job.result(timeout=60.0)
    assert found.value.cause == JOB_LOST
    again = client.submit(PROMPT, max_new_tokens=COUNT, strategy="flowspec", seed=3)
    assert again.result(timeout=60.0).token_ids == plain[0.0]


def test_the_broker_is_paused_for_five_seconds(
    cluster: Cluster, client: Client, plain: dict[float, tuple[int, ...]]
) -> None:
    """Nobody exits, and the job goes on."""
    pids = cluster.pids
    job = begun(client, "flowspec", 1.0)
    os.kill(pids["broker"], signal.SIGSTOP)
    time.sleep(5)
    os.kill(pids["broker"], signal.SIGCONT)
    assert job.result().token_ids == plain[1.0]
    assert cluster.pids == pids
    control = RedisControl(cluster.url, Keys())
    until(lambda: not control.running())
    control.close()
