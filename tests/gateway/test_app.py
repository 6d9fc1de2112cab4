"""The gateway over a real broker and the toy pipeline: every path, every error, every end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx2
import pytest
import redis

from flowspec.client import Client
from flowspec.errors import BrokerFull, BrokerUnreachable
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.pipeline import PipelineWatch, name_of
from flowspec.gateway.settings import Settings
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker, find_server
from flowspec.transport.wire.keys import Keys
from tests.clients import RedisControlAndClient
from tests.gateway.conftest import MODEL, gateway_at
from tests.served import toy_pipeline
from tests.toy import TARGET
from tests.waiting import until

USER = {"role": "user", "content": "hello"}
CHAT = {"model": MODEL, "messages": [USER], "max_tokens": 24, "temperature": 0}
TEXT = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "temperature": 0}


def chat(web: httpx2.Client, **more: Any) -> dict[str, Any]:
    answer = web.post("/v1/chat/completions", json=CHAT | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events(
    web: httpx2.Client, request: dict[str, Any], path: str = "/v1/chat/completions"
) -> list[dict[str, Any]]:
    """The data of a stream's events; it must end as OpenAI's do."""
    with web.stream("POST", path, json=request | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed_text(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in choices
        if choice["index"] == index
    )


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return dict(body["error"])


# ---- answers -------------------------------------------------------------------------------------


def test_a_chat_is_what_the_pipeline_says(web: httpx2.Client, broker: PrivateBroker) -> None:
    with Client(broker.url) as client:
        expected = client.submit(messages=[USER], max_new_tokens=24).result()
    body = chat(web, strategy="flowspec")  # auto may choose to draft nothing
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == 24 + len(expected.prompt_token_ids)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    accepted = body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < accepted < 24
    assert body["model"] == MODEL
    assert body["object"] == "chat.completion"


def test_a_stream_is_the_same_text_in_pieces(web: httpx2.Client) -> None:
    whole = chat(web)["choices"][0]["message"]["content"]
    found = events(web, CHAT | {"stream_options": {"include_usage": True}})
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(found) == whole
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 24
    assert all(event["usage"] is None for event in found[:-1])
    assert len({event["id"] for event in found}) == 1
    assert all("usage" not in event for event in events(web, CHAT))


def test_completions_take_texts_and_ids_in_lists(web: httpx2.Client) -> None:
    one = web.post("/v1/completions", json=TEXT).json()
    assert one["object"] == "text_completion"
    ids = web.post("/tokenize", json={"prompt": "hello"}).json()
    assert ids["count"] == len(ids["tokens"]) == 5
    prompts = ["hello", "abc"]
    several = web.post("/v1/completions", json=TEXT | {"prompt": prompts, "n": 2}).json()
    texts = [choice["text"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert texts[:2] == [one["choices"][0]["text"]] * 2
    assert several["usage"]["prompt_tokens"] == 5 + 3, "a prompt counts once"
    assert several["usage"]["completion_tokens"] == 4 * 24
    by_ids = web.post("/v1/completions", json=TEXT | {"prompt": ids["tokens"]}).json()
    assert by_ids["choices"][0]["text"] == one["choices"][0]["text"]
    lists = web.post("/v1/completions", json=TEXT | {"prompt": [ids["tokens"], [2, 3]]}).json()
    assert lists["choices"][0]["text"] == one["choices"][0]["text"]
    found = events(web, TEXT | {"prompt": prompts}, "/v1/completions")
    assert [streamed_text(found, index) for index in (0, 1)] == [texts[0], texts[2]]


def test_without_max_tokens_a_completion_is_short_and_a_chat_fills_the_context(
    web: httpx2.Client,
) -> None:
    request = {"model": MODEL, "prompt": "hello"}
    assert web.post("/v1/completions", json=request).json()["usage"]["completion_tokens"] == 16
    one = {"max_tokens": None, "max_completion_tokens": 7}
    assert chat(web, **one)["usage"]["completion_tokens"] == 7
    both = {"max_tokens": 3, "max_completion_tokens": 7}
    assert chat(web, **both)["usage"]["completion_tokens"] == 7
    assert chat(web, max_tokens=None)["usage"]["total_tokens"] == TARGET.context


def test_seeds_and_choices(web: httpx2.Client) -> None:
    sampled = {"temperature": 1.0, "seed": 5}

    def texts(**more: Any) -> list[str]:
        return [choice["message"]["content"] for choice in chat(web, **more)["choices"]]

    first = texts(**sampled, n=3)
    assert first == texts(**sampled, n=3)
    assert len(set(first)) == 3
    assert texts(temperature=1.0, seed=6) == first[1:2], "a choice is a seed further"
    assert texts(temperature=1.0, seed=-(2**63)) != texts(temperature=1.0, seed=7)
    unseeded = {"temperature": None, "seed": None}
    assert texts(**unseeded) != texts(**unseeded), "temperature 1 and a random seed by default"


def test_stop_strings_cut_the_text_and_end_the_job(
    web: httpx2.Client, broker: PrivateBroker
) -> None:
    whole = chat(web, max_tokens=200)["choices"][0]["message"]["content"]
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    body = chat(web, max_tokens=200, stop=stop)
    assert body["choices"][0]["message"]["content"] == cut
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < 200
    found = events(web, CHAT | {"max_tokens": 200, "stop": [stop, "never that"]})
    assert streamed_text(found) == cut
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    wait_until_idle(broker)


def test_tokens_behind_a_stop_string_are_not_counted(web: httpx2.Client) -> None:
    """Not even those that came with it in one commit of a tree; a token is a character."""
    plain = {"max_tokens": 200, "strategy": "flowspec"}
    whole = chat(web, **plain)["choices"][0]["message"]["content"]
    for at in range(20, 26):
        stop = whole[at : at + 3]
        wanted = whole.index(stop) + len(stop)
        assert chat(web, **plain, stop=stop)["usage"]["completion_tokens"] == wanted
        asked = CHAT | plain | {"stop": stop, "stream_options": {"include_usage": True}}
        assert events(web, asked)[-1]["usage"]["completion_tokens"] == wanted


def test_an_empty_stop_string_and_a_share_of_nothing_ask_for_nothing(web: httpx2.Client) -> None:
    plain = chat(web)["choices"][0]["message"]["content"]
    for stop in ("", [""], []):
        assert chat(web, stop=stop)["choices"][0]["message"]["content"] == plain
    best = chat(web, temperature=1, top_p=0, seed=3)["choices"][0]["message"]["content"]
    assert best == plain, "the best token alone"


def test_a_prompt_may_be_white_space_and_tokens_are_counted_beyond_the_context(
    web: httpx2.Client,
) -> None:
    answer = web.post("/v1/completions", json=TEXT | {"prompt": "\n \n"})
    assert answer.status_code == 200, answer.text
    assert (
        "empty" in error_of(web.post("/v1/completions", json=TEXT | {"prompt": ""}), 400)["message"]
    )
    long = "a" * (TARGET.context + 100)
    found = web.post("/tokenize", json={"prompt": long}).json()
    assert found["count"] == len(long) > found["max_model_len"]
    assert web.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert web.post("/tokenize", json={"prompt": "\n"}).json()["count"] == 1


def test_the_model_and_its_context(web: httpx2.Client) -> None:
    listed = web.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == MODEL
    assert card["max_model_len"] == TARGET.context
    assert web.get(f"/v1/models/{MODEL}").json() == card
    assert error_of(web.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


def test_health_readiness_and_figures(web: httpx2.Client) -> None:
    chat(web)
    assert web.get("/health").json() == {"status": "ok"}
    for path in ("/health", "/ready"):
        probed = web.head(path)
        assert (probed.status_code, probed.content) == (200, b"")
    assert web.get("/ready").json() == {"status": "ready", "stages": 2}
    figures = web.get("/metrics")
    assert figures.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in ("num_requests_running", "time_to_first_token_seconds", "generation_tokens_total"):
        assert f"vllm:{name}" in figures.text
    assert 'flowspec:pipeline_ready{engine="0",model_name="toy"} 1' in figures.text


def test_the_conversation_is_tokenized_by_its_template(web: httpx2.Client) -> None:
    ids = web.post("/tokenize", json={"model": MODEL, "messages": [USER]}).json()
    assert ids["count"] == chat(web)["usage"]["prompt_tokens"]


def test_fields_without_effect_are_named(web: httpx2.Client) -> None:
    answer = web.post("/v1/chat/completions", json=CHAT | {"user": "me", "chat_id": "1"})
    assert answer.headers["x-flowspec-ignored"] == "user, chat_id"
    assert "x-flowspec-ignored" not in web.post("/v1/chat/completions", json=CHAT).headers
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
    within = CHAT | {
        "messages": [USER | {"name": "me", "content": [part]}],
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    answer = web.post("/v1/chat/completions", json=within)
    named = "stream_options.continuous_usage_stats, messages.name, messages.content.cache_control"
    assert answer.headers["x-flowspec-ignored"] == named


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"messages": []}, "messages", "a list of 1 or more"),
        ({"messages": [{"role": "user", "content": " "}]}, None, "messages say nothing"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "serves no tools"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None, "refuses the messages"),
        ({"max_tokens": 0}, "max_tokens", "expected 1 or more"),
        ({"max_tokens": "5"}, "max_tokens", "expected a whole number"),
        ({"n": 17}, "n", "at most 16"),
        ({"temperature": 2.5}, "temperature", "at most 2"),
        ({"top_p": -0.1}, "top_p", "expected 0.0 or more"),
        ({"seed": 2**64}, "seed", "expected at most"),
        ({"stop": ["a" * 257]}, "stop", "at most 256 characters"),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs is not supported"),
        ({"strategy": "fastest"}, "strategy", "unknown strategy 'fastest'"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, None, "the model's context is"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_an_answer_of_400(
    web: httpx2.Client, more: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    answer = web.post("/v1/chat/completions", json=CHAT | {"stream": stream} | more)
    found = error_of(answer, 400)
    assert says in found["message"]
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"


def test_other_wrong_requests(web: httpx2.Client) -> None:
    assert error_of(web.get("/v1/nothing"), 404)["code"] == "not_found"
    assert "method" in error_of(web.get("/v1/completions"), 405)["message"]
    json_type = {"content-type": "application/json"}
    broken = web.post("/v1/completions", content=b'{"model": ', headers=json_type)
    assert error_of(broken, 400)["code"] == "invalid_json"
    for body, says in (
        (b'{"model": "\xff"}', "not in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too long a number"),
    ):
        found = error_of(web.post("/v1/completions", content=body, headers=json_type), 400)
        assert (found["code"], says in found["message"]) == ("invalid_json", True)
    plain = {"content-type": "text/plain"}
    wrong = web.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=plain)
    assert "as JSON" in error_of(wrong, 415)["message"]
    other = web.post("/v1/completions", json=TEXT | {"model": "gpt-4"})
    assert error_of(other, 404)["code"] == "model_not_found"
    both = web.post("/tokenize", json={"prompt": "a", "messages": [USER]})
    assert "either a prompt or messages" in error_of(both, 400)["message"]
    half = web.post(
        "/v1/completions", content=b'{"model":"toy","prompt":"\\ud800"}', headers=json_type
    )
    assert "Unicode" in error_of(half, 400)["message"] or "unicode" in half.text
    assert error_of(web.post("/v1/completions", json=[1]), 400)["type"] == "invalid_request_error"
    many = web.post("/v1/completions", json=TEXT | {"prompt": ["a"] * 40, "n": 2})
    assert "more than 64 answers" in error_of(many, 400)["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {}},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"max_tokens": 24.0, "seed": 1.0, "n": 1.0, "top_k": 0.0, "priority": 0.0},
        {"max_completion_tokens": 24, "max_tokens": -1},
        {"model": None},
    ],
)
def test_what_clients_send_that_asks_for_nothing_else_is_served(
    web: httpx2.Client, more: dict[str, object]
) -> None:
    assert chat(web, **more)["model"] == MODEL
    assert chat(web, **more)["choices"] == chat(web)["choices"]


def test_a_number_of_alternatives_may_be_written_as_any_whole_number(web: httpx2.Client) -> None:
    found = chat(web, logprobs=True, top_logprobs=2.0)
    assert len(found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    answer = web.post("/v1/completions", json=TEXT | {"logprobs": 3.0})
    assert len(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
    refused = web.post("/v1/completions", json=TEXT | {"logprobs": 2.5})
    assert error_of(refused, 400)["param"] == "logprobs"


def test_a_path_with_a_slash_at_its_end_is_served_where_it_was_asked_for(
    web: httpx2.Client,
) -> None:
    found = web.post("/v1/chat/completions/", json=CHAT, follow_redirects=False)
    assert (found.status_code, found.json()["model"]) == (200, MODEL)
    assert web.get("/health/", follow_redirects=False).status_code == 200


def test_a_large_body_is_refused_and_a_chat_may_be_short_by_default(
    broker: PrivateBroker, endless: None
) -> None:
    settings = Settings(broker.url, name=MODEL, most_body=1000, default_tokens=5)
    with gateway_at(settings) as web:
        assert chat(web, max_tokens=None)["usage"]["completion_tokens"] == 5
        big = json.dumps(TEXT | {"prompt": "a" * 2000}).encode()
        headers = {"content-type": "application/json"}
        told = web.post("/v1/completions", content=big, headers=headers)
        assert error_of(told, 413)["code"] == "request_too_large"

        def pieces() -> Iterator[bytes]:
            yield from (big[at : at + 100] for at in range(0, len(big), 100))

        untold = web.post("/v1/completions", content=pieces(), headers=headers)
        assert error_of(untold, 413)["code"] == "request_too_large"
        assert web.post("/v1/completions", json=TEXT).status_code == 200


def test_keys_guard_everything_but_the_page_and_the_probes(
    broker: PrivateBroker, endless: None
) -> None:
    settings = Settings(
        broker.url, name=MODEL, keys=ApiKeys(["sk-test-key"]), origins=("https://chat.example",)
    )
    with gateway_at(settings) as web:
        for path in ("/", "/health", "/ready"):
            assert web.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            refused = web.get(path)
            assert error_of(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        wrong = {"authorization": "Bearer sk-test-kez"}
        error_of(web.post("/v1/completions", json=TEXT, headers=wrong), 401)
        right = {"authorization": "Bearer sk-test-key"}
        assert web.post("/v1/completions", json=TEXT, headers=right).status_code == 200
        asked = {
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            # As the official client for browsers asks.
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        }
        allowed = web.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
        counted = web.get("/metrics", headers=right).text
        assert 'requests_failed_total{engine="0",model_name="toy",status="401"} 5' in counted
        other = web.options("/v1/chat/completions", headers=asked | {"origin": "https://evil"})
        assert "access-control-allow-origin" not in other.headers


@contextmanager
def held_back(broker: PrivateBroker) -> Iterator[None]:
    """Let nobody write to ``broker``, so that no answer ends."""
    client = connect(broker.url)
    client.client_pause(30_000, all=False)
    try:
        yield
    finally:
        client.client_unpause()
        client.close()


def test_too_many_answers_at_once_get_429(broker: PrivateBroker, endless: None) -> None:
    with (
        gateway_at(Settings(broker.url, name=MODEL, most_open=1)) as web,
        ThreadPoolExecutor(2) as pool,
    ):
        with held_back(broker):
            asked = [pool.submit(web.post, "/v1/chat/completions", json=CHAT) for _ in range(2)]
            (first,), _ = wait(asked, timeout=20, return_when=FIRST_COMPLETED)
            refused = first.result()
            assert error_of(refused, 429)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        assert sorted(one.result().status_code for one in asked) == [200, 429]
        assert web.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_full_queue_of_the_pipeline_gets_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.transport.control.redis_control.QUEUE_CAP", 0)
    with (
        PrivateBroker() as broker,
        toy_pipeline(broker.url),
        gateway_at(Settings(broker.url, name=MODEL)) as web,
    ):
        refused = web.post("/v1/chat/completions", json=CHAT)
        assert "the queue is full" in error_of(refused, 429)["message"]
        assert "retry-after" in refused.headers


def test_a_model_without_template_takes_prompts_and_no_messages() -> None:
    with (
        PrivateBroker() as broker,
        toy_pipeline(broker.url, template=False),
        gateway_at(Settings(broker.url, name=MODEL)) as web,
    ):
        for path, request in (("/v1/chat/completions", CHAT), ("/tokenize", {"messages": [USER]})):
            refused = error_of(web.post(path, json=request), 400)
            assert refused["code"] == "no_chat_template"
            assert "send a prompt to /v1/completions" in refused["message"]
        assert web.post("/v1/completions", json=TEXT).status_code == 200


def test_a_lost_pipeline_gets_503() -> None:
    with PrivateBroker() as broker, gateway_at(Settings(broker.url, name=MODEL)) as web:
        assert "no pipeline here" in error_of(web.get("/ready"), 503)["message"]
        refused = web.post("/v1/chat/completions", json=CHAT)
        assert error_of(refused, 503)["code"] == "pipeline_unavailable"
        assert refused.headers["retry-after"] == "5"
        with toy_pipeline(broker.url) as cluster:
            until(lambda: web.get("/ready").status_code == 200)
            cluster.leases["verify-2"].release()
            until(lambda: web.get("/ready").status_code == 503)
            assert "verify-2" in error_of(web.get("/ready"), 503)["message"]
        broker.stop()
        said = "the pipeline's broker cannot be used now; try again later"
        # What was read is used again for a second.
        until(lambda: error_of(web.get("/ready"), 503)["message"] == said)
        assert error_of(web.get("/v1/models"), 503)["message"] == said
        assert error_of(web.post("/v1/completions", json=TEXT), 503)["message"] == said
        assert 'flowspec:pipeline_ready{engine="0",model_name=""} 0' in web.get("/metrics").text


def test_a_broker_that_takes_no_writes_takes_no_requests() -> None:
    async def ask() -> None:
        workers = {role: {"state": "ready"} for role in ("scheduler", "draft", "verify-1")}
        workers["scheduler"]["broker_full"] = "the broker at h is out of memory"
        client = Mock(
            pipeline=AsyncMock(return_value={"stages": "1"}),
            workers=AsyncMock(return_value=workers),
        )
        with pytest.raises(BrokerFull, match="out of memory"):
            await PipelineWatch(client, "").ready()

    asyncio.run(ask())


def test_an_outage_does_not_cost_the_retries_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOOK_SECONDS", "LOST_LOOK_SECONDS"):
        monkeypatch.setattr(f"flowspec.gateway.pipeline.{name}", 0.0)

    async def hang() -> None:
        await asyncio.Event().wait()

    async def ask() -> Mock:
        client = Mock(pipeline=Mock(side_effect=hang))
        watch = PipelineWatch(client, "")
        for _ in range(3):
            with pytest.raises(BrokerUnreachable, match="has not answered yet"):
                await watch.state()
        await watch.close()
        return client

    assert asyncio.run(ask()).pipeline.call_count == 1, "they share one look"


@contextmanager
def plain_server(port: int) -> Iterator[None]:
    """A server without a password, so that a second one is reached by the same URL."""
    command = [str(find_server()), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield
        process.terminate()


@pytest.mark.live
def test_a_broker_in_the_place_of_another_is_found() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    url = f"redis://127.0.0.1:{port}/0"
    with gateway_at(Settings(url, name=MODEL)) as web:
        for _ in range(2):
            with plain_server(port):
                until(lambda: web.get("/ready").status_code == 503)
                with toy_pipeline(url):
                    until(lambda: web.get("/ready").status_code == 200)
                    chat(web)


def test_a_worker_lost_during_a_stream_is_an_event_of_it(broker: PrivateBroker) -> None:
    with (
        PrivateBroker() as own,
        toy_pipeline(own.url, endless=True) as cluster,
        gateway_at(Settings(own.url, name=MODEL)) as web,
    ):
        long = CHAT | {"max_tokens": 480, "stream": True}
        with web.stream("POST", "/v1/chat/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            job = cluster.control.running()[0]
            cluster.control.revoke(job, "error", "the draft worker was lost")
            data = [line.removeprefix("data: ") for line in lines if line]
        assert data[-1] == "[DONE]"
        error = json.loads(data[-2])["error"]
        assert error["message"] == "the draft worker was lost"
        assert error["type"] == "service_unavailable_error"


def test_a_job_that_another_program_cancels_is_an_answer_of_503(
    web: httpx2.Client, broker: PrivateBroker
) -> None:
    control = RedisControlAndClient(broker.url, Keys())
    with ThreadPoolExecutor(1) as pool, closing(control):
        asked = pool.submit(web.post, "/v1/chat/completions", json=CHAT | {"max_tokens": 480})
        until(lambda: bool(control.running()))
        control.submit({"cancel": control.running()[0]})
        answer = asked.result()
    assert error_of(answer, 503)["code"] == "job_cancelled"
    assert answer.headers["retry-after"] == "5"


# ---- disconnects ---------------------------------------------------------------------------------


def answer_to_a_closed_side(web: httpx2.Client, version: str, body: dict[str, object]) -> bytes:
    """What a client gets that sends a request and closes its side, as ``nc -N`` does."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((web.base_url.host, int(web.base_url.port or 80)), 60) as asking:
        asking.sendall(head.encode() + data)
        asking.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: asking.recv(4096), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(
    web: httpx2.Client, broker: PrivateBroker, stream: bool
) -> None:
    answer = answer_to_a_closed_side(web, "1.1", CHAT | {"max_tokens": 5, "stream": stream})
    answer = answer.replace(b"HTTP/1.1 102 Processing\r\n\r\n", b"")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    _, _, text = answer.partition(b"\r\n\r\n")
    if stream:
        assert b"data: [DONE]" in text
    else:
        assert json.loads(text)["choices"] == chat(web, max_tokens=5)["choices"]
    wait_until_idle(broker)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_that_closes_its_side_has_left(
    web: httpx2.Client, broker: PrivateBroker, stream: bool
) -> None:
    """As nginx does for a client that has left: its jobs end."""
    assert b"finish_reason" not in answer_to_a_closed_side(
        web, "1.0", CHAT | {"max_tokens": 480, "stream": stream}
    )
    wait_until_idle(broker)


def test_half_a_request_behind_which_nothing_comes_is_the_end(web: httpx2.Client) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    with socket.create_connection((web.base_url.host, int(web.base_url.port or 80)), 60) as asking:
        asking.sendall(head)
        asking.shutdown(socket.SHUT_WR)
        assert asking.recv(4096) == b""


def wait_until_idle(broker: PrivateBroker) -> None:
    with Client(broker.url) as client:
        until(lambda: client.load() == (0, 0))


def leave(web: httpx2.Client, stream: bool, seconds: float) -> None:
    """Ask for a long answer and close the connection after ``seconds``, reading nothing."""
    body = json.dumps(CHAT | {"max_tokens": 480, "stream": stream, "n": 2}).encode()
    url = web.base_url
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.host, int(url.port or 80)), 10) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(seconds)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def leave_at_once(web: httpx2.Client, times: int) -> None:
    leaving = [
        threading.Thread(target=leave, args=(web, at % 2 == 0, (at % 7) * 0.02))
        for at in range(times)
    ]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()


def disconnects(web: httpx2.Client, broker: PrivateBroker, times: int) -> None:
    """Leave ``times`` times at every moment of an answer; nothing may be left of any."""
    chat(web)
    wait_until_idle(broker)
    server: redis.Redis = connect(broker.url)
    leave_at_once(web, 10)  # the pool of connections to the broker is bounded, and full now
    wait_until_idle(broker)
    before = descriptors()
    kept = long_kept(server)
    connections = int(server.info("clients")["connected_clients"])  # type: ignore[index]
    for _ in range(0, times, 10):
        leave_at_once(web, 10)
    wait_until_idle(broker)
    keys = Keys()
    until(lambda: long_kept(server) <= kept)
    until(lambda: descriptors() <= before + 2)
    until(lambda: int(server.info("clients")["connected_clients"]) <= connections + 2)  # type: ignore[index]
    assert server.xlen("flowspec:jobs") == 0
    assert not list(server.scan_iter(f"{keys.tag}:run:*"))
    assert 'flowspec:open_answers{engine="0",model_name="toy"} 0' in web.get("/metrics").text
    assert chat(web)["choices"][0]["finish_reason"] == "length"
    server.close()


def long_kept(server: redis.Redis) -> set[bytes]:
    """Outputs that are kept for longer than a minute."""
    found: list[bytes] = list(server.scan_iter(Keys().out("*")))
    return {key for key in found if not 0 <= int(server.pttl(key)) <= 60_000}  # type: ignore[arg-type]


@pytest.mark.live
def test_abrupt_disconnects_leave_nothing(web: httpx2.Client, broker: PrivateBroker) -> None:
    disconnects(web, broker, 30)


@pytest.mark.heavy
def test_two_hundred_abrupt_disconnects_leave_nothing(
    web: httpx2.Client, broker: PrivateBroker
) -> None:
    disconnects(web, broker, 200)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("organisation/model", "organisation/model"),
        ("/srv/models/big/", "big"),
        ("./big", "big"),
        ("models/small.gguf", "small.gguf"),
    ],
)
def test_a_model_has_its_hub_name_or_that_of_its_folder_or_file(target: str, name: str) -> None:
    assert name_of(target) == name
