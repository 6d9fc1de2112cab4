"""Log-probabilities in the gateway's answers: both forms, streamed and whole, cut and held back."""

from __future__ import annotations

import itertools
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.client import Client
from flowspec.core.run.logprobs import ScoredToken, TokenLogprobs, TokenWritten
from flowspec.gateway.logprobs import PlacedToken, TokensOfText, chat_logprobs, text_logprobs
from flowspec.gateway.settings import Settings
from flowspec.gateway.stop_strings import StopFilter
from flowspec.transport.connections.server import PrivateBroker
from tests.gateway.conftest import MODEL, gateway_at

PROMPT = [5, 6, 7]
TEXT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 24,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 3,
}


@pytest.fixture(scope="module")
def client(web: httpx2.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{web.base_url}/v1", api_key="none", max_retries=0)


def token(data: bytes, *, special: bool = False) -> TokenLogprobs:
    return TokenLogprobs(ScoredToken(1, -0.5, TokenWritten(data, special)), ())


# ---- along with the text -------------------------------------------------------------------------


def texts(tokens: list[PlacedToken]) -> str:
    return b"".join(one.token.chosen.written.data for one in tokens).decode()


@given(
    st.lists(st.text("ab\N{EURO SIGN}\N{GRINNING FACE}", min_size=1, max_size=4), max_size=12),
    st.integers(1, 5),
    st.lists(st.text("ab\N{EURO SIGN}", min_size=1, max_size=3), max_size=2),
    st.randoms(),
)
def test_the_tokens_that_were_passed_on_are_those_of_the_text(
    words: list[str], width: int, stops: list[str], random: Any
) -> None:
    """Of a text that is not cut all; of one that is, up to the one in which the cut is."""
    data = "".join(words).encode()
    edges = sorted({0, len(data), *(random.randrange(len(data) + 1) for _ in words)})
    tokens = [token(data[begin:end]) for begin, end in itertools.pairwise(edges)]
    lengths = [len(data[:end].decode(errors="ignore")) for end in edges]
    sizes = [end - begin for begin, end in itertools.pairwise(lengths)]
    text = data.decode()
    stop, queue, passed, found = StopFilter(stops), TokensOfText(), "", list[PlacedToken]()
    at = 0
    for one in range(0, len(tokens), width):
        size = sum(sizes[one : one + width])
        queue.push(tokens[one : one + width], sizes[one : one + width])
        piece = stop.push(text[at : at + size])
        at += size
        passed += piece
        found += queue.passed(piece)
        if stop.end is not None:
            break
    if stop.end is None:
        piece = stop.finish()
        passed += piece
        found += [*queue.passed(piece), *queue.rest()]
        assert texts(found) == text == passed
    written = b"".join(one.token.chosen.written.data for one in found)
    assert data.startswith(written)
    assert written.startswith(passed.encode())
    if stop.end is not None:
        assert all(one.start < len(passed) for one in found)
    for placed, begin in zip(found, edges, strict=False):
        assert placed.start == len(data[:begin].decode(errors="ignore"))


def test_special_tokens_are_no_part_of_an_answer() -> None:
    queue = TokensOfText()
    queue.push([token(b"a"), token(b"</s>", special=True), token(b"")], [1, 0, 0])
    assert texts(list(queue.passed("a"))) == "a"
    (left,) = queue.rest()
    assert left.token.chosen.written.data == b""
    assert left.start == 1


def test_bytes_that_are_no_characters_have_a_name() -> None:
    queue = TokensOfText()
    queue.push([token(b"\xf0\x9f"), token(b"\x98\x80")], [0, 1])
    assert queue.passed("") == ()
    tokens = queue.passed("\N{GRINNING FACE}")
    found: Any = chat_logprobs(tokens)
    assert [one["token"] for one in found["content"]] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    joined = bytes(byte for one in found["content"] for byte in one["bytes"])
    assert joined.decode() == "\N{GRINNING FACE}"
    assert text_logprobs(tokens)["text_offset"] == [0, 0]


# ---- answers -------------------------------------------------------------------------------------


def test_a_chat_has_those_of_the_library(client: openai.OpenAI, broker: PrivateBroker) -> None:
    with Client(broker.url) as plain:
        expected = plain.submit(messages=CHAT["messages"], max_new_tokens=24, logprobs=3).result()  # type: ignore[arg-type]
    whole = client.chat.completions.create(**CHAT).choices[0]  # type: ignore[call-overload]
    assert whole.message.content == expected.text
    content = whole.logprobs.content
    assert [one.logprob for one in content] == [one.chosen.logprob for one in expected.logprobs]
    assert "".join(one.token for one in content) == expected.text
    assert bytes(byte for one in content for byte in one.bytes).decode() == expected.text
    for one, known in zip(content, expected.logprobs, strict=True):
        assert [other.logprob for other in one.top_logprobs] == [each.logprob for each in known.top]
        assert [bytes(other.bytes) for other in one.top_logprobs] == [
            each.written.data for each in known.top
        ]
    chunks = list(client.chat.completions.create(**CHAT, stream=True))  # type: ignore[call-overload]
    streamed = [
        one
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for one in choice.logprobs.content
    ]
    assert streamed == content
    for chunk in chunks:
        for choice in chunk.choices:
            said = choice.logprobs.content if choice.logprobs is not None else []
            assert "".join(one.token for one in said) == (choice.delta.content or "")


def test_completions_have_their_own_form(client: openai.OpenAI) -> None:
    whole = client.completions.create(**TEXT, logprobs=2, n=2)  # type: ignore[call-overload]
    for choice in whole.choices:
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        lengths = [len(one) for one in found.tokens]
        assert found.text_offset == [sum(lengths[:at]) for at in range(len(lengths))]
        for token, logprob, top in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert top[token] == logprob
            assert 2 <= len(top) <= 3
    chunks = list(client.completions.create(**TEXT, logprobs=2, stream=True))  # type: ignore[call-overload]
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    first = whole.choices[0].logprobs
    assert [one for part in streamed for one in part.tokens] == first.tokens
    assert [one for part in streamed for one in part.text_offset] == first.text_offset


def test_a_stop_string_cuts_them_with_the_text(client: openai.OpenAI) -> None:
    plain = client.completions.create(**TEXT, logprobs=0).choices[0]  # type: ignore[call-overload]
    stop = plain.text[9:12]
    cut = plain.text[: plain.text.index(stop)]
    for stream in (False, True):
        answer = client.completions.create(**TEXT, logprobs=0, stop=stop, stream=stream)  # type: ignore[call-overload]
        parts = [chunk.choices[0] for chunk in (answer if stream else [answer])]
        assert "".join(part.text for part in parts) == cut
        tokens = [one for part in parts if part.logprobs for one in part.logprobs.tokens]
        assert "".join(tokens) == cut, "a token of the toy model is a character"
        logprobs = [one for part in parts if part.logprobs for one in part.logprobs.token_logprobs]
        assert logprobs == plain.logprobs.token_logprobs[: len(cut)]


def test_nothing_is_said_where_nothing_was_asked(web: httpx2.Client) -> None:
    for more in ({}, {"logprobs": None}, {"logprobs": False}):
        answer = web.post("/v1/completions", json=TEXT | more)
        assert answer.json()["choices"][0]["logprobs"] is None
    chat = web.post("/v1/chat/completions", json=CHAT | {"logprobs": False, "top_logprobs": 0})
    assert chat.json()["choices"][0]["logprobs"] is None
    bare = web.post("/v1/chat/completions", json=CHAT | {"top_logprobs": None}).json()
    assert all(one["top_logprobs"] == [] for one in bare["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("wrong", [6, -1, True, "2"])
def test_a_completion_has_at_most_five(web: httpx2.Client, wrong: object) -> None:
    refused = web.post("/v1/completions", json=TEXT | {"logprobs": wrong})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs"


def test_a_lossy_strategy_has_none(broker: PrivateBroker, endless: None) -> None:
    lossy = "specpipe_lossy_nucleus"
    with gateway_at(Settings(broker.url, name=MODEL, allowed_strategies=(lossy,))) as web:
        refused = web.post("/v1/completions", json=TEXT | {"logprobs": 1, "strategy": lossy})
    assert refused.status_code == 400
    assert "returns no log-probabilities" in refused.json()["error"]["message"]
