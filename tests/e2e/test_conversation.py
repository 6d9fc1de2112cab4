"""A second turn of real processes begins with the rows of the first, and gives its own text."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.run.limits import TREE_ROWS, in_blocks
from flowspec.core.run.sampling import Sampling
from flowspec.errors import JobFailed
from flowspec.model.reference import Reference
from flowspec.model.weights.directory import default_pair
from tests.e2e.conftest import Clusters
from tests.e2e.test_equality import SAMPLED
from tests.waiting import until

pytestmark = pytest.mark.live

FIRST = "Tell me about the sea, and about ships. "
#: The packaged model's text may differ from the reference's at a near tie of two tokens only, which
#: these prompts do not meet.
STRATEGIES = ("flowspec", "auto", "specpipe", "autoregressive")


@pytest.mark.gate
def test_turns(clusters: Clusters, reference: Reference) -> None:
    _check_turns(clusters(2).url, reference)


def test_a_chat_template_that_does_not_end_ends_its_job_alone(
    tmp_path: Path, reference: Reference
) -> None:
    target, draft = default_pair()
    folder = tmp_path / "target"
    shutil.copytree(target, folder, copy_function=os.symlink)
    template = folder / "chat_template.jinja"
    template.unlink()
    template.write_text(
        "{% if 'more' in messages[0].content %}{% for i in range(9999) %}{% for j in range(9999) %}"
        "{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
        "{{ messages[0].content }}",
        encoding="utf-8",
    )
    prompt = tuple(3 + at * 7 % 400 for at in range(20))
    with (
        Cluster(Setup(str(folder), draft, 2, jobs=4)) as cluster,
        Client(cluster.url) as client,
    ):
        endless = client.submit(messages=[{"role": "user", "content": "more"}])
        other = client.submit(prompt_ids=prompt, max_new_tokens=24)
        assert other.result().token_ids == reference.decode(prompt, 24, Sampling())
        with pytest.raises(
            JobFailed, match="the model's chat template took longer than 2 s"
        ) as said:
            endless.result()
        assert said.value.cause == "refused"
        short = client.submit(messages=[{"role": "user", "content": FIRST}], max_new_tokens=4)
        assert len(short.result().token_ids) == 4


def test_answers_at_once_share_their_prompt(reference: Reference) -> None:
    """And an answer that is cancelled leaves its prompt's rows."""
    prompt = tuple(3 + at * 7 % 400 for at in range(120))
    samplings = [Sampling(1.0, seed=seed) for seed in range(4)]
    with (
        Cluster(Setup(*default_pair(), 2, jobs=4)) as cluster,
        Client(cluster.url) as client,
    ):
        jobs = [
            client.submit(prompt_ids=prompt, max_new_tokens=24, temperature=1.0, seed=one.seed)
            for one in samplings
        ]
        results = [job.result() for job in jobs]
        for result, sampling in zip(results, samplings, strict=True):
            assert result.token_ids == reference.decode(prompt, 24, sampling)
        known = len(prompt) - 1
        assert [one.stats["cached_tokens"] for one in results] == [0, known, known, known]
        other = prompt[::-1]
        long = client.submit(prompt_ids=other, max_new_tokens=600)
        next(iter(long.stream()))
        long.cancel()
        later = client.submit(prompt_ids=(*other, 9), max_new_tokens=8).result()
        assert later.token_ids == reference.decode((*other, 9), 8, Sampling())
        assert later.stats["cached_tokens"] == known


def test_turns_with_rows_in_blocks(reference: Reference) -> None:
    """Rows go straight, too. The pool has room for one job, so others wait for its end."""
    room = in_blocks(TREE_ROWS + 700)
    setup = Setup(*default_pair(), 2, rows="straight", jobs=3, kv="paged", most_rows=room)
    with Cluster(setup) as cluster:
        _check_turns(cluster.url, reference)
        with Client(cluster.url) as client:
            jobs = [client.submit(FIRST * (at + 1), max_new_tokens=16) for at in range(3)]
            for job in jobs:
                result = job.result()
                prompt = result.prompt_token_ids
                assert result.token_ids == reference.decode(prompt, 16, Sampling())
            with pytest.raises(JobFailed, match=f"KV rows, .* the pipeline has {room}"):
                client.submit(FIRST, max_new_tokens=900).result()
            found = _pools(client)
            assert [set(pool) for pool in found] == [
                {"store", "blocks", "free", "shared", "block_rows"}
            ] * 2


def _pools(client: Client) -> list[dict[str, Any]]:
    """What both stages say of their pools at the next renewal of their leases."""

    def said() -> list[dict[str, Any]]:
        workers = client.workers()
        return [workers[f"verify-{stage}"]["kv"] for stage in (1, 2)]

    return until(lambda: all(0 < pool["free"] < pool["blocks"] for pool in said()) and said())


def _check_turns(url: str, reference: Reference) -> None:
    with Client(url) as client:
        opening = client.submit(FIRST * 4, max_new_tokens=24, cache_salt="turns").result()
        assert opening.stats["cached_tokens"] == 0
        prompt = (*opening.prompt_token_ids, *opening.token_ids)
        for strategy, sampling in zip(STRATEGIES, SAMPLED, strict=False):
            prompt = (*prompt, *opening.prompt_token_ids[:9])
            result = client.submit(
                prompt_ids=prompt,
                max_new_tokens=20,
                strategy=strategy,
                temperature=sampling.temperature,
                seed=sampling.seed,
                cache_salt="turns",
            ).result()
            assert result.token_ids == reference.decode(prompt, 20, sampling)
            assert result.stats["cached_tokens"] == len(prompt) - 10
            prompt = (*prompt, *result.token_ids)
        apart = client.submit(prompt_ids=prompt, max_new_tokens=4, cache_salt="others").result()
        assert apart.stats["cached_tokens"] == 0
        alone = client.submit(
            prompt_ids=prompt, max_new_tokens=4, cache_salt="turns", reuse=False
        ).result()
        assert alone.stats["cached_tokens"] == 0
        assert alone.token_ids == apart.token_ids
