"""What stands before every request: its host, its API key, the size of its body, bounded writes."""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flowspec.gateway.errors import ApiError
from flowspec.gateway.hosts import AllowedHosts
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.metrics import Metrics
from flowspec.observe import logger

#: Paths that are served without a key: the page asks for it, and probes have none.
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: Longest time that a client may leave what is sent to it unread, seconds.
SEND_SECONDS = 60.0
#: Longest time between two parts of a request's body, seconds.
RECEIVE_SECONDS = 30.0
ID_HEADER = "x-request-id"
#: Status of an answer that nobody reads.
CLIENT_GONE = 499
_FIRST_ERROR = 400


class ClientStalled(OSError):
    """The client does not read what is sent to it."""


class Guard:
    """Refuses what must not reach ``app``; counts errors, logs method, path, status and time."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, hosts: AllowedHosts, most_body: int, metrics: Metrics
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._most_body = most_body
        self._metrics = metrics
        self._log = logger(role="gateway")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A redirect to a path without it would name an address that a proxy may not serve.
        scope["path"] = scope["path"].rstrip("/") or "/"
        request = _Guarded(receive, send, self._most_body)
        began = time.monotonic()
        try:
            self._check(scope)
            await self._app(scope, request.receive, request.send)
        except ApiError as error:
            await request.fail(scope, error)
        except (ClientStalled, ClientDisconnect):
            pass  # the client has gone; what it had asked for was ended on the way here
        except Exception as error:  # noqa: BLE001 - the text of an unknown fault may hold a prompt
            kind = type(error).__name__
            self._log.error("request failed", id=request.id, kind=kind, at=_place(error))
            await request.fail(scope, ApiError(500, f"the gateway failed: {kind}"))
        finally:
            self._note(scope, request, time.monotonic() - began)

    def _note(self, scope: Scope, request: _Guarded, seconds: float) -> None:
        status = request.status
        if status is not None and status >= _FIRST_ERROR and status != CLIENT_GONE:
            self._metrics.count("flowspec:requests_failed_total", status=str(status))
        self._log.info(
            "request",
            id=request.id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            seconds=round(seconds, 4),
        )

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._hosts.allow(headers.get("host", "")):
            raise ApiError(
                403,
                "this gateway is not served under that name; use its address, or start it with "
                "--allowed-host NAME",
                code="host_not_allowed",
            )
        # A browser asks by OPTIONS, without a key, whether it may send one.
        is_open = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
        if not is_open and not self._keys.allow(headers.get("authorization", "")):
            raise ApiError(
                401,
                "this gateway needs an API key that it knows, as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._most_body:
            raise too_large(self._most_body)


class _Guarded:
    """One request: counts its body, bounds every wait for its client, and gives it an id."""

    def __init__(self, receive: Receive, send: Send, most_body: int) -> None:
        self.id = uuid.uuid4().hex
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._most_body = most_body
        self._read = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next part of the body; then, whether the client has gone, however long it takes."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "the request's body did not come", code="timeout") from None
        self._complete = not message.get("more_body", False)
        self._read += len(message.get("body", b""))
        if self._read > self._most_body:
            raise too_large(self._most_body)
        return message

    async def fail(self, scope: Scope, error: ApiError) -> None:
        """Answer with ``error``, unless an answer has begun: then it is cut short."""
        if self.status is None:
            answer = JSONResponse(error.body, error.status, error.headers)
            await answer(scope, self._receive, self.send)

    async def send(self, message: Message) -> None:
        """Send a part of the answer; ClientStalled if the client does not read it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[ID_HEADER] = self.id
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None


def _place(error: Exception) -> str:
    """Where ``error`` was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"


def too_large(most: int) -> ApiError:
    """The answer to a request whose body is larger than ``most`` bytes."""
    return ApiError(
        413, f"the request's body is larger than {most} bytes", code="request_too_large"
    )
