"""Connections: how many there may be, and how long one may take to say what it asks for."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from flowspec.gateway.errors import unavailable
from flowspec.observe import logger

#: Longest time until the head of a connection's first request is complete, seconds.
HEAD_SECONDS = 10.0
#: Longest time until the head of a further request is complete, seconds from the end of the answer
#: before it: longer than the 60 to 75 seconds for which proxies keep a connection and reuse it.
IDLE_SECONDS = 90.0
#: After how many seconds a client without a connection may try again.
_RETRY_SECONDS = 1


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of a server with at most ``most`` connections, each bounded until it asks.

    The server itself waits for ever for a request's head, and its limit of connections is an answer
    to requests, so that silent ones would be kept.
    """

    most: int
    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As the server does: the transport of a stream, which asyncio's stubs leave open.
        if len(self.connections) >= self.most:
            self.transport = transport
            transport.write(_full(self.most))
            transport.close()
            return
        super().connection_made(transport)
        self._expect_head(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._expect_head(IDLE_SECONDS)  # before the next request, which may have come already
        super().on_response_complete()

    def _expect_head(self, seconds: float) -> None:
        self._stop_waiting()
        self._head_deadline = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


def bounded(most: int) -> type[BoundedProtocol]:
    """The protocol of a server with at most ``most`` connections."""
    return type("Bounded", (BoundedProtocol,), {"most": most})


def _full(most: int) -> bytes:
    """The answer to a connection for which there is no room."""
    logger(role="gateway").warning("connection refused", most=most)
    error = unavailable(
        f"{most} connections are open and no more may be; try again", "too_many_connections"
    )
    body = json.dumps(error.body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Retry-After: {_RETRY_SECONDS}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
