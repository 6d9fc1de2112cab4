"""What a guarded application's client gets when the application or the client does not behave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowspec.gateway import guard
from flowspec.gateway.guard import Guard
from flowspec.gateway.hosts import AllowedHosts
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.metrics import Metrics

BODY: Message = {"type": "http.request", "body": b"", "more_body": False}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


def sent_by(
    app: ASGIApp, parts: Sequence[Message] = (BODY,), *, reads: bool = True
) -> list[Message]:
    """What a client gets that sends ``parts``, and then waits; ``reads``: whether it reads."""
    waiting = list(parts)
    got: list[Message] = []

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message: Message) -> None:
        if not reads:
            await asyncio.Event().wait()
        got.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"host", b"127.0.0.1")],
    }
    guarded = Guard(app, ApiKeys(), AllowedHosts(), 1000, Metrics())
    asyncio.run(guarded(scope, receive, send))
    return got


def status_and_error(got: Sequence[Message]) -> tuple[int, str]:
    start, body = got
    return start["status"], json.loads(body["body"])["error"]["message"]


def test_an_unknown_fault_is_named_without_its_text() -> None:
    async def faulty(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("the prompt")

    assert status_and_error(sent_by(faulty)) == (500, "the gateway failed: KeyError")


def test_a_fault_behind_the_head_cuts_the_answer_short() -> None:
    async def faulty(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        raise KeyError

    (start,) = sent_by(faulty)
    assert start["status"] == 200


@pytest.mark.parametrize("parts", [(), ({**BODY, "more_body": True},)])
def test_a_body_that_does_not_come_ends_the_request(
    parts: Sequence[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "RECEIVE_SECONDS", 0.01)

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            await receive()

    assert status_and_error(sent_by(reading, parts)) == (408, "the request's body did not come")


def test_parts_that_are_too_large_together_are_refused() -> None:
    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            await receive()

    part: Message = {"type": "http.request", "body": b"x" * 600, "more_body": True}
    assert status_and_error(sent_by(reading, (part, part)))[0] == 413


def test_a_client_that_does_not_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SEND_SECONDS", 0.01)
    ended = []

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(START)
        except guard.ClientStalled:
            ended.append(scope["path"])
            raise

    assert sent_by(answering, reads=False) == []
    assert ended == ["/v1/completions"]


def test_a_client_that_left_gets_nothing() -> None:
    async def left(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnect

    assert sent_by(left) == []
