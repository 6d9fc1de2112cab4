"""Log-probabilities of jobs: for every exact strategy those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowspec.client import Client
from flowspec.core.run.logprobs import MOST_ALTERNATIVES
from flowspec.errors import JobError, JobFailed
from flowspec.rehearse.replay import merge, replay
from flowspec.results import Result
from flowspec.strategies import EXACT, STRATEGIES
from flowspec.transport.connections.server import PrivateBroker
from tests.marks import crossed
from tests.served import toy_pipeline
from tests.toy import PROMPT

TOKENS = 40


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with PrivateBroker() as broker, toy_pipeline(broker.url), Client(broker.url) as client:
        yield client


def answer(client: Client, strategy: str, logprobs: int | None, temperature: float) -> Result:
    job = client.submit(
        prompt_ids=PROMPT,
        max_new_tokens=TOKENS,
        strategy=strategy,
        temperature=temperature,
        seed=3,
        logprobs=logprobs,
    )
    return job.result()


@pytest.mark.parametrize(
    ("strategy", "asked"), crossed(EXACT, ((3, 0.0), (0, 1.0), (MOST_ALTERNATIVES, 1.0)), keep=3)
)
def test_they_are_those_of_plain_decoding(
    client: Client, strategy: str, asked: tuple[int, float]
) -> None:
    logprobs, temperature = asked
    plain = answer(client, "autoregressive", logprobs, temperature)
    found = answer(client, strategy, logprobs, temperature)
    assert found.token_ids == plain.token_ids
    assert found.logprobs == plain.logprobs
    assert [one.chosen.id for one in found.logprobs] == list(found.token_ids)
    for one in found.logprobs:
        assert len(one.top) == logprobs
        assert sorted((other.logprob for other in one.top), reverse=True) == [
            other.logprob for other in one.top
        ]
        assert one.chosen.logprob <= 0
    assert answer(client, strategy, None, temperature).logprobs == ()


def test_a_prompt_whose_rows_are_kept_changes_nothing() -> None:
    with (
        PrivateBroker() as broker,
        toy_pipeline(broker.url, kept_rows=500),
        Client(broker.url) as client,
    ):
        prompt = PROMPT * 4
        first = client.submit(prompt_ids=prompt, max_new_tokens=TOKENS, logprobs=4).result()
        again = client.submit(prompt_ids=prompt, max_new_tokens=TOKENS, logprobs=4).result()
        assert again.stats["cached_tokens"]
        assert again.logprobs == first.logprobs


def test_a_recording_with_them_replays(client: Client) -> None:
    job = client.submit(prompt_ids=PROMPT, max_new_tokens=TOKENS, logprobs=2, record=True)
    found = job.result()
    lines = job.recording()
    assert any("ScoredCommit" in line for line in lines)
    assert replay(merge(lines)).tokens == found.token_ids


def test_each_piece_of_a_stream_has_its_own(client: Client) -> None:
    job = client.submit(prompt_ids=PROMPT, max_new_tokens=TOKENS, strategy="auto", logprobs=1)
    for chunk in job.stream():
        assert [one.chosen.id for one in chunk.logprobs] == list(chunk.token_ids)
        assert len(chunk.sizes) == len(chunk.token_ids)
        assert sum(chunk.sizes) == len(chunk.text)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(EXACT)))
def test_a_lossy_strategy_refuses_them_in_one_line(client: Client, strategy: str) -> None:
    with pytest.raises(JobFailed, match="returns no log-probabilities") as failed:
        answer(client, strategy, 2, 0.0)
    assert failed.value.cause == "refused"
    assert "\n" not in str(failed.value)
    assert answer(client, strategy, None, 0.0).stats["lossy"]


@pytest.mark.parametrize("wrong", [-1, 21, "3", 1.5, True])
def test_a_wrong_number_is_refused(client: Client, wrong: object) -> None:
    with pytest.raises(JobError, match="logprobs is"):
        client.submit("hello", logprobs=wrong)  # type: ignore[arg-type]
