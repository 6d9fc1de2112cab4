"""Workers as a user starts them: claims, records, failures and their messages."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.errors import (
    BrokerUnreachable,
    ClusterError,
    ConfigError,
    JobError,
    JobFailed,
    ModelError,
)
from flowspec.model.weights.directory import default_pair
from flowspec.start.boot import stage_number
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.commands import run, start
from tests.e2e.conftest import PROCESSES, Clusters, Run, left_in, surroundings, workers_of
from tests.waiting import seconds_of, until

pytestmark = pytest.mark.live

PROMPT = "Describe how to open a text file in Python."


def worker(*words: str, url: str) -> subprocess.CompletedProcess[str]:
    """Run one worker process to its end."""
    return run(*words, environment={**os.environ, "FLOWSPEC_REDIS_URL": url})


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("stage", ["0", "-1", "two", "", "²"])
def test_a_stage_is_a_number(stage: str) -> None:
    with pytest.raises(ConfigError, match=r"expected the number of a stage, 1 or more"):
        stage_number(stage)


def test_a_stage_that_is_no_number_is_refused_before_the_broker_is_asked() -> None:
    line = said(worker("workers.verify", "--stage=0", url="redis://localhost:1"))
    assert line == "flowspec verify: --stage is 0; expected the number of a stage, 1 or more"


@pytest.mark.gate
@pytest.mark.parametrize("words", [("workers.scheduler", "--stages=1"), ("flowspec", "status")])
def test_a_broker_that_forbids_info_is_no_broker_out_of_reach(words: tuple[str, ...]) -> None:
    with PrivateBroker() as broker:
        with closing(connect(broker.url)) as admin:
            admin.acl_setuser("default", enabled=True, commands=["-info"])
        line = said(worker(*words, url=broker.url))
    assert "no permissions to run the 'info' command" in line
    assert "`flowspec acl` writes users" in line


def test_a_stage_outside_the_pipeline_is_refused(clusters: Clusters) -> None:
    with pytest.raises(ConfigError, match=r"is not in the pipeline; its stages are 1 to 2"):
        stage_number("3", 2)
    line = said(worker("workers.verify", "--stage=3", url=clusters(2).url))
    assert "stage 3 is not in the pipeline; its stages are 1 to 2" in line


@pytest.mark.parametrize("serving", [False, True])
def test_workers_do_not_find_the_record_of_an_earlier_pipeline(
    monkeypatch: pytest.MonkeyPatch, *, serving: bool
) -> None:
    """They would take its stages and models for theirs; a scheduler that serves keeps its own."""
    found = []

    def spawn(cluster: Cluster, role: str, module: str, *arguments: str) -> None:
        found.append(control.pipeline())
        raise ClusterError("not started")

    monkeypatch.setattr(Cluster, "_spawn", spawn)
    with PrivateBroker() as broker:
        control = RedisControl(broker.url, Keys())
        control.set_pipeline({"stages": "1"})
        if serving:
            assert control.claim("scheduler", "a token", {})
        with pytest.raises(ClusterError, match="not started"):
            Cluster(Setup("target", "draft", 2), url=broker.url).start()
        control.close()
    assert found == [{"stages": "1"} if serving else {}]


@pytest.mark.parametrize(
    ("middles", "model", "says"),
    [((), "1", "has no middle models"), (("draft",), "2", "are 1 to 1")],
)
def test_a_middle_model_outside_the_chain_is_refused(
    middles: tuple[str, ...], model: str, says: str
) -> None:
    with Cluster(Setup("target", "draft", 1, middles)) as cluster:
        assert says in said(worker("workers.middle", f"--model={model}", url=cluster.url))


def test_two_workers_cannot_claim_one_stage(clusters: Clusters) -> None:
    cluster = clusters(2)
    line = said(worker("workers.verify", "--stage", "2", url=cluster.url))
    assert "verify-2 is taken by" in line
    assert f":{cluster.pids['verify-2']}" in line
    assert "draft is taken by" in said(worker("workers.draft", url=cluster.url))
    assert "scheduler is taken by" in said(
        worker("workers.scheduler", "--stages", "2", url=cluster.url)
    )
    with Client(cluster.url) as client:
        assert client.submit("still served?", max_new_tokens=2).result().finish_reason == "length"


def test_another_model_under_the_same_name_is_refused(clusters: Clusters, tmp_path: Path) -> None:
    with PrivateBroker() as broker:
        environment = {**os.environ, "FLOWSPEC_REDIS_URL": broker.url}
        with start("workers.scheduler", "--stages", "2", environment=environment):
            draft = default_pair()[1]
            line = said(worker("workers.verify", "--stage", "1", "--target", draft, url=broker.url))
    assert "is not the one the pipeline was set up with" in line


def test_workers_without_a_broker_say_so(tmp_path: Path) -> None:
    for arguments in (
        ("workers.verify", "--stage", "1"),
        ("workers.draft",),
        ("workers.scheduler",),
    ):
        assert "cannot reach the broker at unix://" in said(
            worker(*arguments, url=f"unix://{tmp_path}/none")
        )


def test_a_wrong_password_is_said_and_not_shown(clusters: Clusters) -> None:
    url = clusters(2).url
    password = url.split(":")[2].split("@")[0]
    line = said(worker("workers.verify", "--stage", "1", url=url.replace(password, "wrong-secret")))
    assert "refused the password" in line
    assert "wrong-secret" not in line


def test_setups_that_cannot_work_start_nothing(tmp_path: Path) -> None:
    target, draft = default_pair()
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in Path(target).iterdir():
        data = file.read_bytes()
        (cut / file.name).write_bytes(
            data[: len(data) // 2] if file.suffix == ".safetensors" else data
        )
    for setup, says in (
        (Setup(str(cut), draft, 2), "is cut short"),
        (Setup(str(tmp_path), draft, 2), "no config.json"),
        (Setup(target, draft, 13), "the target has 12 layers"),
        (Setup("head", draft, 1), "the target is head, and an EAGLE head can only draft"),
        (Setup("ngram", draft, 1), "the target is ngram, and ngram can only draft"),
        (
            Setup(target, draft, 1, ("medium", "head")),
            "the middle model is head, and an EAGLE head can only draft",
        ),
        (
            Setup(target, draft, 1, ("ngram",)),
            "the middle model is ngram, and ngram can only draft",
        ),
    ):
        cluster = Cluster(setup)
        with pytest.raises(ModelError, match=says):
            cluster.start()
        assert cluster.pids == {}


@pytest.mark.parametrize("flag", ["target", "middle"])
@pytest.mark.parametrize("name", ["head", "ngram"])
def test_a_scheduler_refuses_what_can_only_draft_before_it_asks_for_a_broker(
    tmp_path: Path, flag: str, name: str
) -> None:
    line = said(
        worker(
            "workers.scheduler", f"--{flag}", name, "--stages", "1", url=f"unix://{tmp_path}/none"
        )
    )
    assert line.startswith(f"flowspec scheduler: the {flag}")
    assert "can only draft; expected a language model" in line


@pytest.fixture
def doomed() -> Iterator[Cluster]:
    """A pipeline of two stages to break."""
    with Cluster(Setup(*default_pair(), 2)) as cluster:
        yield cluster


def start_slow_job(client: Client) -> tuple[object, list[int]]:
    """A job in the middle of its output."""
    job = client.submit(PROMPT, max_new_tokens=900, strategy="autoregressive")
    stream = job.stream()
    ids = []
    while len(ids) < 10:
        ids += next(stream).token_ids
    return stream, ids


def test_a_broker_that_stops_again_and_again_ends_everything_with_a_line(
    doomed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.restarts.MOST", 0)
    monkeypatch.setattr("flowspec.async_client.RECONNECT_SECONDS", 5.0)
    url = doomed.url
    workers = workers_of(url)
    assert len(workers) == PROCESSES
    with Client(url) as client:
        stream, _ = start_slow_job(client)
        os.kill(doomed.pids["broker"], signal.SIGKILL)
        with pytest.raises(BrokerUnreachable, match="cannot reach the broker"):
            for _ in stream:  # type: ignore[attr-defined]
                continue
    until(lambda: workers_of(url) == [])
    with pytest.raises(ClusterError, match="the private broker stopped with status -9"):
        doomed.check()


def test_a_look_that_fails_is_said_and_the_next_one_starts_the_worker_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    with Cluster(Setup(*default_pair(), 1), say=said.append) as cluster:
        look = cluster._look_after

        def failing(role: str) -> None:
            monkeypatch.setattr(cluster, "_look_after", look)
            raise ValueError("a fault")

        monkeypatch.setattr(cluster, "_look_after", failing)
        until(lambda: said)
        assert said == ["the processes were not looked at: ValueError: a fault"]
        before = cluster.pids["verify-1"]
        os.kill(before, signal.SIGKILL)
        until(lambda: cluster.pids["verify-1"] != before)


def test_a_stopped_scheduler_is_noticed_by_the_client(
    doomed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doomed, "_free", lambda role, pid: False)  # it is not started again
    os.kill(doomed.pids["scheduler"], signal.SIGKILL)
    with (
        Client(doomed.url) as client,
        pytest.raises(ClusterError, match="no scheduler serves the pipeline"),
    ):
        client.submit("anyone?").result()


@pytest.mark.gate
def test_up_status_submit_watch_cancel_down(flowspec: Run) -> None:
    shares = ("--keep-rows", "30", "--most-rows", "2500")
    up = flowspec("up", "--stages", "2", "--jobs", "2", *shares)
    assert up.returncode == 0, up.stderr
    try:
        assert up.stdout.startswith("export FLOWSPEC_REDIS_URL='unix://")
        again = flowspec("up", "--stages", "2")
        assert again.returncode == 1
        assert "is up already" in again.stderr
        status = flowspec("status")
        assert status.returncode == 0
        assert status.stdout.count("ready") == 4
        assert (
            "0 running of at most 2, 0 waiting; each stage has room for 2500 KV rows"
            in status.stdout
        )
        assert "texts end at </s>\n" in status.stdout
        told = json.loads(flowspec("status", "--json").stdout)["pipeline"]
        assert (told["stages"], told["most_rows"], told["drafts"]) == (2, 2500, ["draft"])
        answered = flowspec("generate", PROMPT, "--max-new-tokens", "4")
        note = "note: the pipeline that runs here answers, of the packaged model"
        assert answered.stderr.splitlines()[0] == note
        job = flowspec("submit", PROMPT, "--max-new-tokens", "8").stdout.strip()
        watched = flowspec("watch", job, "--json")
        assert '"finish_reason": "length"' in watched.stdout
        same = flowspec("submit", PROMPT, "--max-new-tokens", "8").stdout.strip()
        known = json.loads(flowspec("watch", same, "--json").stdout)
        prompt = len(known["prompt_token_ids"])
        assert known["stats"]["cached_tokens"] == (min(prompt - 1, 30) if prompt > 16 else 0)
        wide = flowspec("submit", PROMPT, "--max-new-tokens", "1000").stdout.strip()
        assert "the pipeline has 2500: shorten" in flowspec("watch", wide).stderr
        slow = ("submit", PROMPT, "--max-new-tokens", "900", "--strategy", "autoregressive")
        # On a busy machine the first may be at their end before the last is submitted.
        long = [flowspec(*slow).stdout.strip() for _ in range(4)]
        found = json.loads(flowspec("status", "--json").stdout)
        assert found["running"] == 2
        assert found["waiting"] > 0
        ended = [flowspec("cancel", job) for job in reversed(long)]
        assert [each.returncode for each in ended] == [0] * 4, ended
        assert "tokens (cancelled)" in ended[0].stdout
    finally:
        down = flowspec("down")
    assert down.returncode == 0, down.stderr
    url = up.stdout.split("'")[1]
    assert workers_of(url) == []


def test_flags_of_a_private_pipeline_start_one_beside_the_one_that_is_up(flowspec: Run) -> None:
    assert flowspec("up", "--stages", "2").returncode == 0
    try:
        ask = ("generate", PROMPT, "--max-new-tokens", "4")
        private = flowspec(*ask, "--stages", "1")
        assert private.stderr.startswith(
            "note: starts a private pipeline of the packaged model, as flags describe one"
        )
        assert private.stdout == flowspec(*ask).stdout
    finally:
        assert flowspec("down").returncode == 0
    assert flowspec("status").returncode == 1


def test_a_job_that_nobody_knows_is_said(flowspec: Run, clusters: Clusters) -> None:
    for name in ("cancel", "watch"):
        assert "there is no job 1-0" in flowspec(name, "1-0", url=clusters(2).url).stderr


@pytest.mark.gate
def test_down_never_ends_a_process_that_is_not_ours(flowspec: Run, place: Path) -> None:
    """A stale note may hold a process id that another process has now."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            (place / "state" / "flowspec").mkdir(parents=True)
            note = {"pid": bystander.pid, "url": "unix:///none", "target": "toy"}
            (place / "state" / "flowspec" / "up.json").write_text(json.dumps(note))
            assert "no pipeline of `flowspec up` runs here" in flowspec("down").stderr
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_ctrl_c_during_up_stops_what_was_started(place: Path) -> None:
    with start("flowspec", "up", "--stages", "2", environment=surroundings(place)) as up:
        until(lambda: list(place.glob("flowspec-broker-*/s")))
        up.process.send_signal(signal.SIGINT)
        assert up.ended().returncode == 130
    assert left_in(place) == []


def test_up_says_why_it_cannot(flowspec: Run, tmp_path: Path) -> None:
    done = flowspec("up", "--redis-url", f"unix://{tmp_path}/none")
    assert done.returncode == 1
    assert "cannot reach the broker" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- the Python client ---------------------------------------------------------------------------


@pytest.mark.gate
def test_the_client_streams_what_the_result_holds(client: Client) -> None:
    job = client.submit(PROMPT, max_new_tokens=24)
    chunks = list(job.stream())
    result = job.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert len(chunks) > 1
    assert client.job(job.id).result() == result, "a job can be read again by its id"


def test_prompt_ids_are_taken_as_they_are(client: Client) -> None:
    result = client.submit(prompt_ids=[0, 482, 28], max_new_tokens=3).result()
    assert result.prompt_token_ids == (0, 482, 28)
    with pytest.raises(JobFailed, match="vocabulary ends at 4095"):
        client.submit(prompt_ids=[4096]).result()


def test_an_idempotency_key_answers_with_the_first_job(client: Client) -> None:
    first = client.submit(PROMPT, max_new_tokens=6, idempotency_key="once").result()
    second = client.submit(PROMPT, max_new_tokens=6, idempotency_key="once").result()
    assert second == first


def test_client_cancel(client: Client) -> None:
    job = client.submit(PROMPT, max_new_tokens=900, strategy="autoregressive")
    stream = job.stream()
    next(stream)
    job.cancel()
    result = job.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 900


def test_values_that_cannot_be_right_never_leave_the_client(client: Client) -> None:
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 0}, {"top_p": 2.0}):
        with pytest.raises(JobError):
            client.submit(PROMPT, **wrong)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="empty"):
        client.submit(" ")


def answer(client: Client) -> None:
    next(iter(client.submit(PROMPT, max_new_tokens=4, reuse=False).stream()))


@pytest.mark.heavy
def test_the_first_token_of_an_idle_pipeline_waits_for_no_poll(client: Client) -> None:
    """Needs a machine without other work: its 95th percentile is within 30 ms of its median."""
    seconds = []
    for pause in Random(1).choices((0.05, 0.15, 0.35, 0.6), k=60):
        time.sleep(pause)
        seconds.append(seconds_of(lambda: answer(client)))
    median, *_, late = statistics.quantiles(seconds[1:], n=20)[9:19]
    assert late <= median + 0.03
