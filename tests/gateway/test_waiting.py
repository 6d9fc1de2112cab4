"""Which request begins first, and one that does not wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from flowspec.gateway.settings import Settings
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.keys import Keys
from tests.gateway.conftest import MODEL, SECONDS, gateway_at
from tests.served import toy_pipeline
from tests.waiting import until


@pytest.fixture(scope="module")
def broker() -> Iterator[PrivateBroker]:
    with PrivateBroker() as broker, toy_pipeline(broker.url, jobs=1, endless=True):
        yield broker


@pytest.fixture
def web(broker: PrivateBroker) -> Iterator[httpx2.Client]:
    with gateway_at(Settings(broker.url, name=MODEL)) as client:
        yield client


def ask(web: httpx2.Client, tokens: int, **more: object) -> httpx2.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": tokens} | more
    return web.post("/v1/completions", json=body)


def until_queued(broker: PrivateBroker, jobs: int) -> None:
    control = RedisControl(broker.url, Keys())
    until(lambda: control.running() and len(control.queued()) == jobs)
    control.close()


def test_the_lowest_priority_begins_first_as_vllms(
    web: httpx2.Client, broker: PrivateBroker
) -> None:
    ended: list[int] = []

    def wait_for(priority: int) -> None:
        assert ask(web, 4, priority=priority).status_code == 200
        ended.append(priority)

    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 400, "stream": True}
    with ThreadPoolExecutor(3) as pool:
        with web.stream("POST", "/v1/completions", json=body) as first:
            assert first.status_code == 200
            answers = []
            for place, priority in enumerate((0, 9, -9)):
                answers.append(pool.submit(wait_for, priority))
                until_queued(broker, place + 1)
        for answer in answers:
            answer.result(SECONDS)
    assert ended == [-9, 0, 9]


def test_a_request_that_cannot_begin_in_time_is_told_when_to_come_again(
    web: httpx2.Client,
) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 400, "stream": True}
    with web.stream("POST", "/v1/completions", json=body) as first:
        assert first.status_code == 200
        late = ask(web, 4, wait_seconds=0.1)
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "late"
    assert int(late.headers["Retry-After"]) >= 1
    assert ask(web, 4, wait_seconds=SECONDS).status_code == 200


@pytest.mark.parametrize("field", [{"priority": 101}, {"priority": 0.5}, {"wait_seconds": -1.0}])
def test_terms_out_of_range_are_refused(web: httpx2.Client, field: dict[str, float]) -> None:
    answer = ask(web, 4, **field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in field
