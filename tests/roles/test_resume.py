"""A job goes on behind what is committed, whichever worker it loses, with the target's own text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from tests.roles.test_worker import PROMPT, Start, rig, start
from tests.toy import TARGET
from tests.toy_cluster import ToyCluster, ids_of
from tests.waiting import until

pytestmark = pytest.mark.live

__all__ = ["rig", "start"]  # fixtures

COUNT = 60
SAMPLED = Sampling(1.0, seed=5)
STRATEGIES = (
    "autoregressive",
    "flowspec",
    "flowspec:lockstep=on",
    "pipedec",
    "specpipe",
    "auto",
)


def expected(
    count: int = COUNT, sampling: Sampling = Sampling(), prompt: str = PROMPT
) -> tuple[int, ...]:
    """The target's own text, on behind every token that ends one."""
    text = list(ids_of(prompt))
    while len(text) < len(prompt) + count:
        text += TARGET.decode(text, len(prompt) + count - len(text), sampling)
    return tuple(text[len(prompt) :])


def slow(cluster: ToyCluster) -> None:
    """Passes of stage 1 take a moment, so that a job is met at work."""
    compute = cluster.stages[0].run

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.01)
        return compute(*arguments)

    cluster.stages[0].run = slowly  # type: ignore[method-assign]


def committed(cluster: ToyCluster, job: str) -> int:
    entries = cluster.control.read_output(job, "0", 0.5)
    return sum(len(json.loads(entry.fields.get("ids", "[]"))) for entry in entries)


def met_at_work(cluster: ToyCluster, job: str, tokens: int) -> None:
    """Wait until ``job`` has committed ``tokens``."""
    until(lambda: committed(cluster, job) >= tokens, pause=0.005)


@pytest.mark.parametrize("role", ["draft", "verify-1", "verify-2"])
def test_the_text_of_a_job_that_lost_a_worker_is_the_targets(start: Start, role: str) -> None:
    cluster = start(2, endless=True, kept_rows=200)
    slow(cluster)
    for at, strategy in enumerate(STRATEGIES):
        sampling = (Sampling(), SAMPLED)[at % 2]
        spec = JobSpec(
            prompt=PROMPT, max_new_tokens=COUNT, strategy=strategy, sampling=sampling, reuse=at > 2
        )
        job = cluster.submit(spec)
        met_at_work(cluster, job, 1 + 7 * at)
        cluster.kill(role)
        before = committed(cluster, job)
        assert before < COUNT, "killed too late"
        cluster.start_again(role)
        ids, end, error = cluster.wait(job)
        assert (ids, error) == (expected(COUNT, sampling), ""), strategy
        stats = json.loads(end["stats"])
        assert stats["tokens"] == COUNT
        assert 0 < stats["resumed_tokens"] < COUNT
        assert stats["ttft_seconds"] >= 0


@pytest.mark.parametrize("role", ["draft", "middle-1", "verify-1"])
def test_a_chains_job_goes_on_too(start: Start, role: str) -> None:
    cluster = start(1, middles=(0.8,), endless=True)
    slow(cluster)
    job = cluster.submit(
        JobSpec(prompt=PROMPT, max_new_tokens=COUNT, strategy="pipespec", sampling=SAMPLED)
    )
    met_at_work(cluster, job, 10)
    cluster.kill(role)
    cluster.start_again(role)
    ids, _, error = cluster.wait(job)
    assert (ids, error) == (expected(COUNT, SAMPLED), "")


def test_jobs_beside_it_go_on_as_well(start: Start) -> None:
    cluster = start(2, jobs=3, endless=True)
    slow(cluster)
    specs = [JobSpec(prompt=PROMPT + letter, max_new_tokens=40) for letter in "abcde"]
    jobs = [cluster.submit(spec) for spec in specs]
    met_at_work(cluster, jobs[0], 5)
    cluster.kill("verify-2")
    until(lambda: not cluster.control.running())
    cluster.start_again("verify-2")
    for letter, job in zip("abcde", jobs, strict=True):
        ids, _, error = cluster.wait(job)
        assert (ids, error) == (expected(40, prompt=PROMPT + letter), "")


def test_a_job_goes_on_after_all_workers_are_lost(start: Start) -> None:
    cluster = start(2, endless=True)
    slow(cluster)
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=COUNT, sampling=SAMPLED))
    met_at_work(cluster, job, 10)
    for role in ("draft", "verify-1", "verify-2"):
        cluster.kill(role)
    for role in ("verify-2", "draft", "verify-1"):
        cluster.start_again(role)
    ids, _, error = cluster.wait(job)
    assert (ids, error) == (expected(COUNT, SAMPLED), "")


def test_a_job_that_loses_three_workers_ends_with_what_is_committed(start: Start) -> None:
    cluster = start(2, endless=True)
    slow(cluster)
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=400))
    for attempt in range(3):
        met_at_work(cluster, job, 5 * (attempt + 1))
        cluster.kill("verify-1")
        cluster.start_again("verify-1")
    ids, end, error = cluster.wait(job)
    assert error.startswith("the worker of verify stage 1 was lost, and the job had lost 2 workers")
    assert end["finish_reason"] == "error"
    assert ids == expected(400)[: len(ids)]
    assert cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=5))[0] == expected(5)


def test_log_probabilities_go_on_as_well(start: Start) -> None:
    cluster = start(2, endless=True)
    slow(cluster)
    spec = JobSpec(prompt=PROMPT, max_new_tokens=COUNT, logprobs=2)
    job = cluster.submit(spec)
    met_at_work(cluster, job, 10)
    cluster.kill("verify-2")
    cluster.start_again("verify-2")
    ids, _, error = cluster.wait(job)
    assert (ids, error) == (expected(COUNT), "")
    entries = [entry.fields for entry in cluster.control.read_output(job, "0", 0.5)]
    scored = [entry["logprobs"] for entry in entries if entry["kind"] == "tokens"]
    assert sum(len(json.loads(text)) for text in scored) == COUNT
