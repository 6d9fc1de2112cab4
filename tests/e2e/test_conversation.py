"""A second turn of real processes begins with the rows of the first, and gives its own text."""

from __future__ import annotations

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.model.directory import default_pair
from flowspec.model.reference import Reference
from tests.e2e.conftest import Clusters
from tests.e2e.test_equality import SAMPLED

FIRST = "Tell me about the sea, and about ships. "
#: The packaged model's text may differ from the reference's at a near tie of two tokens only, which
#: these prompts do not meet.
STRATEGIES = ("flowspec", "auto", "specpipe", "autoregressive")


@pytest.mark.parametrize("straight", [False, True])
def test_turns(clusters: Clusters, reference: Reference, straight: bool) -> None:
    if straight:
        with Cluster(Setup(*default_pair(), 2, rows="straight")) as cluster:
            _check_turns(cluster.url, reference)
    else:
        _check_turns(clusters(2).url, reference)


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
