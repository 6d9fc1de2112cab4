"""Programs that others wrote, against a gateway with the packaged models."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from flowspec.client import Client
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.settings import Settings
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from tests.e2e.conftest import Clusters
from tests.gateway.conftest import gateway_at

pytestmark = pytest.mark.live

KEY = "sk-for-the-tests"
MODEL = "target"
QUESTION = "Tom has 5 apples and buys 7 more. How many apples does he have?"
TURNS: list[dict[str, str]] = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "He has 12."},
    {"role": "user", "content": "He eats 2. How many are left?"},
]
COUNT = 32


@pytest.fixture(scope="module")
def web(clusters: Clusters) -> Iterator[httpx2.Client]:
    settings = Settings(clusters(2).url, keys=ApiKeys([KEY]))
    with gateway_at(settings) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        yield client


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    """The answer to TURNS by plain decoding, with the template applied by hand."""
    tokenizer = Tokenizer(open_directory(default_pair()[0]))
    return tokenizer.detokenizer.decode(list(reference.generate(by_hand(tokenizer), COUNT)))


def by_hand(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of TURNS, written as the packaged chat template says."""
    text = (
        f"Question: {TURNS[0]['content']}\nAnswer: {TURNS[1]['content']}\n\n"
        f"Question: {TURNS[2]['content']}\nAnswer:"
    )
    return tokenizer.encode(text, raw=True)


@pytest.fixture
def client(web: httpx2.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{web.base_url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_a_chat_is_the_template_applied_by_hand_token_for_token(
    web: httpx2.Client, client: openai.OpenAI, expected: str
) -> None:
    tokenizer = Tokenizer(open_directory(default_pair()[0]))
    ids = web.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
    assert tuple(ids) == by_hand(tokenizer)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=TURNS,
        max_tokens=COUNT,
        temperature=0,  # type: ignore[arg-type]
    )
    text = client.completions.create(model=MODEL, prompt=ids, max_tokens=COUNT, temperature=0)
    assert chat.choices[0].message.content == text.choices[0].text == expected
    sampled = {"model": MODEL, "max_tokens": COUNT, "temperature": 0.8, "seed": 11, "top_p": 0.9}
    warm = client.chat.completions.create(messages=TURNS, **sampled)  # type: ignore[call-overload]
    assert warm.choices[0].message.content == (
        client.completions.create(prompt=ids, **sampled).choices[0].text  # type: ignore[call-overload]
    )


def test_log_probabilities_are_those_of_the_librarys_model(
    clusters: Clusters, web: httpx2.Client, client: openai.OpenAI, reference: Reference
) -> None:
    """Of greedy and of drawn tokens, of a text whose characters are spread over several tokens."""
    url = clusters(2).url
    tokenizer = Tokenizer(open_directory(default_pair()[0]))
    turns = [{"role": "user", "content": "Say \N{GRINNING FACE}\N{EURO SIGN} \N{GRINNING FACE}!"}]
    prompt = web.post("/tokenize", json={"messages": turns}).json()["tokens"]
    for sampling in ({"temperature": 0}, {"temperature": 1.9, "seed": 5, "top_p": 0.999}):
        choice = client.chat.completions.create(
            model=MODEL,
            messages=turns,
            max_tokens=COUNT,
            logprobs=True,
            top_logprobs=4,
            **sampling,  # type: ignore[arg-type]
        ).choices[0]
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        data = b"".join(bytes(one.bytes or ()) for one in content)
        assert data.decode(errors="replace") == choice.message.content
        legacy = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=COUNT,
            logprobs=4,
            **sampling,  # type: ignore[arg-type]
        ).choices[0]
        assert legacy.text == choice.message.content
        assert legacy.logprobs is not None
        found = [one.logprob for one in content]
        assert legacy.logprobs.token_logprobs == pytest.approx(found, abs=1e-4)
        with Client(url) as plain:
            job = plain.submit(
                messages=turns,
                max_new_tokens=COUNT,
                strategy="autoregressive",
                logprobs=4,
                **sampling,  # type: ignore[arg-type]
            ).result()
        assert tokenizer.detokenizer.decode(list(job.token_ids)) == choice.message.content
        rows = reference.logprobs([*prompt, *job.token_ids])[len(prompt) - 1 :]
        for row, token, one, known in zip(rows, job.token_ids, content, job.logprobs, strict=False):
            assert one.logprob == pytest.approx(row[token], abs=1e-4)
            assert one.logprob == pytest.approx(known.chosen.logprob, abs=1e-4)
            best = np.sort(row)[::-1][:4]
            assert [other.logprob for other in one.top_logprobs] == pytest.approx(best, abs=1e-4)


@pytest.mark.gate
def test_the_official_client(client: openai.OpenAI, expected: str) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).owned_by == "flowspec"
    request: dict[str, Any] = {"model": MODEL, "messages": TURNS, "max_tokens": COUNT}
    answer = client.chat.completions.create(**request, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens == COUNT
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None
    chunks = list(
        client.chat.completions.create(
            **request, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    stop = expected[10:14]
    cut = client.chat.completions.create(**request, temperature=0, stop=[stop])
    assert cut.choices[0].message.content == expected[: expected.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    several = client.chat.completions.create(**request, n=3, seed=1, temperature=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_the_official_clients_errors(web: httpx2.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 2000)
    assert long.value.code == "context_length_exceeded"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model=MODEL, messages=TURNS, tools=[tool])  # type: ignore[call-overload]
    with (
        openai.OpenAI(
            base_url=f"{web.base_url}/v1", api_key="sk-wrong-key", max_retries=0
        ) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


@pytest.mark.gate
def test_the_official_asynchronous_client(web: httpx2.Client, expected: str) -> None:
    async def run() -> list[str]:
        base = f"{web.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL,
                    messages=TURNS,
                    max_tokens=COUNT,
                    temperature=0,
                    stream=True,  # type: ignore[arg-type]
                )
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return "".join(pieces)

            return list(await asyncio.gather(*(one() for _ in range(6))))

    assert asyncio.run(run()) == [expected] * 6


def test_another_library(web: httpx2.Client, expected: str) -> None:
    """The hub's client, which shares no code with the official one."""
    with InferenceClient(base_url=f"{web.base_url}/v1", api_key=KEY, timeout=30) as client:
        answer = client.chat_completion(TURNS, model=MODEL, max_tokens=COUNT, temperature=0.0)
        assert answer.choices[0].message.content == expected
        stream = client.chat_completion(
            TURNS, model=MODEL, max_tokens=COUNT, temperature=0.0, stream=True
        )
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == expected


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(web: httpx2.Client, expected: str) -> None:
    body = {"model": MODEL, "messages": TURNS, "max_tokens": COUNT, "temperature": 0}

    def curl(request: dict[str, Any]) -> str:
        headers = ("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}")
        url = f"{web.base_url}/v1/chat/completions"
        command = ["curl", "-sSN", "--max-time", "30", url, *headers, "-d", json.dumps(request)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert json.loads(curl(body))["choices"][0]["message"]["content"] == expected
    lines = [line for line in curl(body | {"stream": True}).split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == expected


def test_the_requests_of_a_chat_front_end(web: httpx2.Client, expected: str) -> None:
    """Open WebUI asks for the models, then streams, then asks for a title of the conversation."""
    listed = web.get("/v1/models").json()["data"]
    assert {"id", "object", "created", "owned_by"} <= listed[0].keys()
    streamed = {
        "stream": True,
        "model": listed[0]["id"],
        "messages": TURNS,
        "temperature": 0,
        "max_tokens": COUNT,
        "stream_options": {"include_usage": True},
        "user": {"name": "User", "id": "0b1f", "email": "user@localhost", "role": "admin"},
    }
    with web.stream("POST", "/v1/chat/completions", json=streamed) as answer:
        assert answer.status_code == 200
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert data[-1] == "[DONE]"
    events = [json.loads(line) for line in data[:-1]]
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    assert text == expected
    assert events[-1]["usage"]["completion_tokens"] == COUNT
    title = {
        "model": listed[0]["id"],
        "messages": [{"role": "user", "content": "### Task:\nGenerate a concise title."}],
        "stream": False,
        "max_completion_tokens": 16,
        "metadata": {"task": "title_generation"},
    }
    found = web.post("/v1/chat/completions", json=title)
    assert found.status_code == 200
    assert found.headers["x-flowspec-ignored"] == "metadata"
