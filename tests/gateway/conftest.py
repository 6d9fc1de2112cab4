from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import pytest

from flowspec.gateway.server import address_of, listen, serve
from flowspec.gateway.settings import Settings
from flowspec.transport.connections.server import PrivateBroker
from tests.served import toy_pipeline

#: The model's name in these tests.
MODEL = "toy"
SECONDS = 30.0

Gateways = Callable[..., httpx2.Client]


@contextmanager
def gateway_at(settings: Settings) -> Iterator[httpx2.Client]:
    """A gateway with ``settings`` on a port of its own, and a client of it."""
    listening = listen("127.0.0.1", 0)
    stopped = threading.Event()
    thread = threading.Thread(target=serve, args=(settings, listening, stopped.is_set))
    thread.start()
    try:
        with httpx2.Client(base_url=address_of(listening), timeout=SECONDS) as client:
            client.get("/health")  # the socket takes connections before the server does
            yield client
    finally:
        stopped.set()
        thread.join(SECONDS)
        listening.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def broker() -> Iterator[PrivateBroker]:
    with PrivateBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def endless(broker: PrivateBroker) -> Iterator[None]:
    """A toy pipeline whose texts end by length alone."""
    with toy_pipeline(broker.url, endless=True):
        yield


@pytest.fixture(scope="module")
def web(broker: PrivateBroker, endless: None) -> Iterator[httpx2.Client]:
    """A client of a gateway to the toy pipeline."""
    with gateway_at(Settings(broker.url, name=MODEL)) as client:
        yield client
