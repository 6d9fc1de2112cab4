"""Probes: boxes announce themselves, answer once each, and are not waited for without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flowspec.errors import ClusterError, ConfigError
from flowspec.rehearse.probe import (
    BULK_BYTES,
    BoxReport,
    Measure,
    ProbeServer,
    announced,
    collect,
    link_seconds,
    mean_link,
)
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.server import PrivateBroker


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with PrivateBroker() as broker:
        yield broker.url


@pytest.fixture
def client(url: str) -> Iterator[BrokerClient]:
    client = BrokerClient(url)
    client.run([("FLUSHALL",)])
    yield client
    client.close()


def serve(url: str, name: str, measure: Measure) -> threading.Thread:
    """A probe in a thread, which ends after its first request."""
    answered = threading.Event()

    def once(request: Mapping[str, Any]) -> tuple[int, Mapping[str, Mapping[int, float]]]:
        answered.set()
        return measure(request)

    client = BrokerClient(url)
    probe = ProbeServer(client, name, "cpu", once)
    probe.announce()
    thread = threading.Thread(target=probe.run, args=(answered.is_set,), daemon=True)
    thread.start()
    return thread


def test_every_box_answers_for_itself(url: str, client: BrokerClient) -> None:
    sizes = {"a": 3, "b": 5}
    threads = [
        serve(url, name, lambda request, size=size: (size, {"layer": {1: request["cost"] * size}}))
        for name, size in sizes.items()
    ]
    assert announced(client) == ["a", "b"]
    told: list[str] = []
    reports = collect(client, {"id": "one", "cost": 2.0}, told.append)
    for thread in threads:
        thread.join()
    assert [(report.name, report.memory) for report in reports] == [("a", 3), ("b", 5)]
    assert [report.seconds for report in reports] == [{"layer": {"1": 6.0}}, {"layer": {"1": 10.0}}]
    assert told == ["measuring a, 1 of 2", "measuring b, 2 of 2"]
    assert all(report.round_trip > 0 < report.bulk for report in reports)


def test_a_box_that_cannot_measure_says_why(url: str, client: BrokerClient) -> None:
    def fail(request: Mapping[str, Any]) -> tuple[int, Mapping[str, Mapping[int, float]]]:
        raise ConfigError("no such device")

    thread = serve(url, "c", fail)
    with pytest.raises(ClusterError, match="box c could not measure: no such device"):
        collect(client, {"id": "two"})
    thread.join()


def test_no_box_is_said_at_once(client: BrokerClient) -> None:
    with pytest.raises(ClusterError, match=r"start `python -m workers\.probe --name NAME`"):
        collect(client, {"id": "three"})


def test_a_silent_box_is_waited_for_as_long_as_said(url: str, client: BrokerClient) -> None:
    ProbeServer(client, "d", "cpu", lambda request: (0, {})).announce()
    with pytest.raises(ClusterError, match=r"box d did not answer within 0\.1 s"):
        collect(client, {"id": "four"}, limit=0.1)


def test_a_link_is_the_mean_of_the_boxes(client: BrokerClient) -> None:
    trip, bulk = link_seconds(client, "e")
    assert 0 < trip < bulk
    one = BoxReport("e", 1, {}, 0.001, 1.0, "cpu")
    other = BoxReport("f", 1, {}, 0.003, 3.0, "cpu")
    link = mean_link([one, other])
    assert link.latency == pytest.approx(0.002)
    assert link.bandwidth == pytest.approx(BULK_BYTES / 2.0)
