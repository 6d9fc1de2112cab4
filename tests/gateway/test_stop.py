"""A gateway that is stopped ends the answers under way as its documentation says: with an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from flowspec.gateway.server import address_of, listen, serve
from flowspec.gateway.settings import Settings
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.gateway.conftest import MODEL, SECONDS
from tests.served import toy_pipeline
from tests.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.gate]


@pytest.fixture
def broker() -> Iterator[PrivateBroker]:
    """Of a pipeline that runs one job at a time, whose texts end by length alone."""
    with PrivateBroker() as broker, toy_pipeline(broker.url, jobs=1, endless=True):
        yield broker


def ask(address: str, stream: bool) -> httpx2.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 400, "stream": stream}
    return httpx2.post(f"{address}/v1/completions", json=body, timeout=SECONDS)


def stopped_beside_two(
    broker: PrivateBroker, control: RedisControl, finish_seconds: float
) -> tuple[httpx2.Response, httpx2.Response]:
    """A streamed answer that runs, and one that waits, as a gateway is asked to stop."""
    stopped = threading.Event()
    listening = listen("127.0.0.1", 0)
    arguments = (Settings(broker.url, name=MODEL), listening, stopped.is_set)
    server = threading.Thread(
        target=serve, args=arguments, kwargs={"finish_seconds": finish_seconds}
    )
    server.start()
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(ask, address_of(listening), True)
        until(lambda: len(control.running()) == 1)
        waiting = pool.submit(ask, address_of(listening), False)
        until(lambda: len(control.queued()) == 1)
        stopped.set()
        found = begun.result(SECONDS), waiting.result(SECONDS)
    server.join(SECONDS)
    assert not server.is_alive()
    listening.close()
    return found


def test_answers_under_way_may_end_of_themselves(broker: PrivateBroker) -> None:
    control = RedisControl(broker.url, Keys())
    streamed, whole = stopped_beside_two(broker, control, SECONDS)
    assert '"finish_reason":"length"' in streamed.text.replace(" ", "")
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    control.close()


def test_answers_under_way_end_with_an_error_and_leave_no_job(broker: PrivateBroker) -> None:
    control = RedisControl(broker.url, Keys())
    streamed, whole = stopped_beside_two(broker, control, 0.1)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "stopping"
    assert whole.json()["error"]["message"] == "the gateway is stopping; send the request again"
    *_, last, done = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert json.loads(last.removeprefix("data: ")) == whole.json()
    assert done == "data: [DONE]"
    until(lambda: not control.running() and not control.queued())
    control.close()
