"""Connections: how many there may be, how long one may take to ask, and which are half-closed."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowspec.gateway.errors import unavailable
from flowspec.observe import logger

#: Longest time until the head of a connection's first request is complete, seconds.
HEAD_SECONDS = 10.0
#: Longest time until the head of a further request is complete, seconds from the end of the answer
#: before it: longer than the 60 to 75 seconds for which proxies keep a connection and reuse it.
IDLE_SECONDS = 90.0
#: How often a client that has closed its side is told that its request is being processed, seconds.
PROBE_SECONDS = 0.5
#: After how many seconds a client without a connection may try again.
_RETRY_SECONDS = 1


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of a server with at most ``most`` connections, each bounded until it asks.

    The server itself waits for ever for a request's head, and its limit of connections is an answer
    to requests, so that silent ones would be kept. It also takes a client that has sent all, and
    says so, for one that has left: ``nc -N`` would get no answer.
    """

    most: int
    _head_deadline: asyncio.TimerHandle | None = None
    _is_half_closed = False

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
        if self._answers:
            self._stop_waiting()

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._expect_head(IDLE_SECONDS)  # before the next request, which may have come already
        super().on_response_complete()
        if self._is_half_closed and not self._answers:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection until a request that has come as a whole is answered.

        Not one of HTTP/1.0, which cannot be asked whether its client has left.
        """
        is_old = self.conn.their_http_version == b"1.0"
        if is_old or not self._answers or self.cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._probe()
        return True

    def _probe(self) -> None:
        """Write to a half-closed client: one that has left altogether refuses what comes."""
        if self.transport.is_closing() or not self._answers or self.cycle.response_started:
            return
        processing = h11.InformationalResponse(status_code=102, headers=[], reason="Processing")
        self.transport.write(self.conn.send(processing) or b"")
        self.loop.call_later(PROBE_SECONDS, self._probe)

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
