"""Both kinds of readers of streams: what arrives comes once and in order, and a loss is told."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowspec.errors import BrokerError
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.link import incoming as module
from flowspec.transport.link.incoming import Incoming, open_incoming
from flowspec.transport.link.pending_read import BATCH, PendingRead
from flowspec.transport.link.tail import MOST_HELD, Tail
from tests.marks import examples
from tests.waiting import SECONDS, until

STREAM = "flowspec:{p0}:s"
ROWS = "flowspec:{p0}:r"
START = {STREAM: "0-0"}
KINDS = {"near": (PendingRead, 10.0), "far": (Tail, 0.0)}
Open = Callable[..., Incoming]


@pytest.fixture(params=KINDS)
def opened(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: PrivateBroker
) -> Iterator[Open]:
    kind, nearest = KINDS[request.param]
    monkeypatch.setattr(module, "NEAR_SECONDS", nearest)
    given: list[Incoming] = []

    def open_one(url: str = "", *, patient: bool = True) -> Incoming:
        made = open_incoming(url or server.url, START, patient=patient)
        assert type(made) is kind
        given.append(made)
        return made

    yield open_one
    for made in given:
        made.close()


def wait(incoming: Incoming, seconds: float = SECONDS) -> bool:
    """Whether there is news within ``seconds``, by the file descriptor."""
    return incoming.news or bool(select.select([incoming], [], [], seconds)[0])


def numbers(found: Sequence[tuple[str, Sequence[Any]]]) -> list[int]:
    return [int(flat[1]) for name, entries in found for _, flat in entries if name == STREAM]


def collect(incoming: Incoming, count: int) -> list[int]:
    """The next ``count`` numbers, as a worker that waits for them takes them."""
    found: list[int] = []

    def complete() -> bool:
        waited = not incoming.news
        if len(found) < count and wait(incoming):
            found.extend(numbers(incoming.take(waited=waited)))
        return len(found) >= count

    until(complete, pause=0.0)
    return found


def add(client: redis.Redis, first: int, count: int = 1) -> None:
    for number in range(first, first + count):
        client.xadd(STREAM, {"n": number})


def test_nothing_is_no_news(opened: Open, client: redis.Redis) -> None:
    incoming = opened()
    assert not incoming.news
    assert not select.select([incoming], [], [], 0.05)[0]


@given(counts=st.lists(st.integers(1, 5), max_size=6))
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_entries_come_once_and_in_order(
    opened: Open, client: redis.Redis, counts: list[int]
) -> None:
    client.delete(STREAM)
    incoming = opened()
    sent = 0
    for count in counts:
        add(client, sent, count)
        assert collect(incoming, count) == list(range(sent, sent + count))
        sent += count
    assert not incoming.news


@pytest.mark.live
def test_what_arrives_during_a_pass_is_taken_at_once(opened: Open, client: redis.Redis) -> None:
    """A drafter that took one answer of three would draft on with two of them unread."""
    incoming = opened()
    add(client, 0, 3)
    assert wait(incoming)
    time.sleep(0.05)  # the pass
    assert numbers(incoming.take(waited=False)) == [0, 1, 2]


@pytest.mark.parametrize("nearest", [10.0, 0.0])
def test_what_was_written_at_once_is_taken_at_once(
    server: PrivateBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, nearest: float
) -> None:
    """A stage that has the messages of a bundle and not all their rows would fail their runs."""
    monkeypatch.setattr(module, "NEAR_SECONDS", nearest)
    incoming = open_incoming(server.url, {STREAM: "0-0", ROWS: "0-0"})
    write = client.pipeline(transaction=True)
    for number in range(2 * BATCH + 1):
        write.xadd(ROWS, {"n": number})
    write.xadd(STREAM, {"n": 0})
    write.execute()
    assert wait(incoming)
    found = incoming.take(waited=True)
    assert sum(len(entries) for _, entries in found) == 2 * BATCH + 2
    incoming.close()


@pytest.mark.live
def test_a_silent_stream_is_no_error(
    opened: Open, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pending_read", "tail"):
        monkeypatch.setattr(f"flowspec.transport.link.{name}.MAX_BLOCK_SECONDS", 0.05)
    incoming = opened()
    for _ in range(15):
        if wait(incoming, 0.02):
            assert incoming.take(waited=True) == []
    add(client, 7)
    assert collect(incoming, 1) == [7]


@pytest.mark.live
def test_what_arrives_during_a_long_pass_is_taken_behind_it(
    opened: Open, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read that was under way has ended without an entry by then."""
    for name in ("pending_read", "tail"):
        monkeypatch.setattr(f"flowspec.transport.link.{name}.MAX_BLOCK_SECONDS", 0.05)
    incoming = opened()
    time.sleep(0.2)
    add(client, 0, 2)
    time.sleep(0.1)
    assert incoming.news
    assert numbers(incoming.take(waited=False)) == [0, 1]


def test_a_slow_worker_gets_everything(opened: Open, client: redis.Redis) -> None:
    count = MOST_HELD + 300
    with client.pipeline(transaction=False) as pipeline:
        for number in range(count):
            pipeline.xadd(STREAM, {"n": number})
        pipeline.execute()
    incoming = opened()
    assert collect(incoming, count) == list(range(count))


def test_a_lost_server_is_told_at_once_where_nobody_tries_again(
    opened: Open, client: redis.Redis
) -> None:
    with PrivateBroker() as own:
        incoming = opened(own.url, patient=False)
    assert wait(incoming)
    with pytest.raises(BrokerError, match="cannot reach the broker"):
        incoming.take(waited=True)


def test_a_lost_connection_is_made_again_and_loses_nothing(
    opened: Open, client: redis.Redis
) -> None:
    incoming = opened()
    add(client, 0)
    assert collect(incoming, 1) == [0]
    client.client_kill_filter(_type="normal", skipme=True)
    add(client, 1, 2)
    assert collect(incoming, 2) == [1, 2]


def test_a_closed_reader_ends_its_reading(opened: Open, client: redis.Redis) -> None:
    incoming = opened()
    incoming.close()
    until(lambda: not any(str(one["cmd"]).startswith("xread") for one in client.client_list()))
