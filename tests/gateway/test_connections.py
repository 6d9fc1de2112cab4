"""Connections that say nothing, or half a request, end; and there are not more than a number."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx2
import pytest

from flowspec.gateway import connections
from flowspec.gateway.settings import Settings
from tests.gateway.conftest import SECONDS, gateway_at
from tests.waiting import until

pytestmark = pytest.mark.live

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LONGEST = 0.5
IDLE = 1.5


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx2.Client]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", LONGEST)
    monkeypatch.setattr(connections, "IDLE_SECONDS", IDLE)
    with gateway_at(Settings("redis://127.0.0.1:1", most_connections=8)) as client:
        client.get("/health", headers={"connection": "close"})  # it keeps none of its own
        yield client


def connect(web: httpx2.Client) -> socket.socket:
    return socket.create_connection((web.base_url.host, int(web.base_url.port or 0)), SECONDS)


@pytest.mark.gate
@pytest.mark.parametrize("begun", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_request_that_does_not_come_ends_its_connection(web: httpx2.Client, begun: bytes) -> None:
    with connect(web) as connection:
        connection.sendall(begun)
        while connection.recv(4096):
            continue


@pytest.mark.gate
def test_a_head_that_comes_slowly_has_one_bound(web: httpx2.Client) -> None:
    with connect(web) as connection:

        def ended() -> bool:
            try:
                connection.sendall(b"G")
            except (ConnectionResetError, BrokenPipeError):
                return True
            return False

        until(ended, pause=0.05)


@pytest.mark.gate
def test_silent_connections_make_room_again(web: httpx2.Client) -> None:
    silent = [connect(web) for _ in range(8)]
    with connect(web) as further:
        answer = further.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in answer
        assert further.recv(4096) == b""
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()
    assert web.get("/health").status_code == 200


def test_a_connection_lives_on_from_answer_to_answer(web: httpx2.Client) -> None:
    with connect(web) as connection:
        for _ in range(4):
            connection.sendall(HEAD + b"\r\n")
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")
            while not answer.endswith(b"}"):
                answer += connection.recv(4096)
            time.sleep(LONGEST * 1.2)


def test_a_connection_that_is_idle_lives_longer_than_proxies_keep_it() -> None:
    assert connections.IDLE_SECONDS > 75
