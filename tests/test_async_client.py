"""The asynchronous client: the same names and results as the other one, over one shared read."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import redis
import structlog.testing

from flowspec import AsyncClient, AsyncJob, Client, Job
from flowspec.errors import (
    BrokerError,
    BrokerUnreachable,
    ClientClosed,
    ClusterError,
    JobError,
    JobFailed,
    JobTimeout,
)
from flowspec.transport.base import OutputEntry
from flowspec.transport.connections.connection import OPTIONS
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.async_control import AsyncRedisControl
from flowspec.transport.control.output_reader import OutputReader
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.control.replies import Claims
from flowspec.transport.wire.keys import Keys
from tests.served import toy_pipeline
from tests.toy_cluster import ToyCluster
from tests.waiting import SECONDS

T = TypeVar("T")
#: Text of one and of several turns.
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "so"}]


@pytest.fixture
def cluster(server: PrivateBroker, client: redis.Redis) -> Iterator[ToyCluster]:
    with toy_pipeline(server.url, endless=True) as cluster:
        yield cluster


def with_client(url: str, use: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """What ``use`` returns of a client at ``url``; bounded."""

    async def run() -> T:
        async with asyncio.timeout(SECONDS), AsyncClient(url) as client:
            return await use(client)

    return asyncio.run(run())


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_both_clients_have_the_same_names() -> None:
    assert public(AsyncClient) - public(Client) == {"open", "following", "end_waits"}
    assert public(Client) < public(AsyncClient)
    assert public(Job) == public(AsyncJob)
    taken = inspect.signature(AsyncClient.submit).parameters
    assert taken == inspect.signature(Client.submit).parameters


def test_both_clients_get_the_same_result(cluster: ToyCluster, server: PrivateBroker) -> None:
    with Client(server.url) as plain:
        expected = plain.submit("hello", max_new_tokens=20).result()
        chat = plain.submit(messages=TURNS, max_new_tokens=20).result()

    async def use(client: AsyncClient) -> None:
        found = await (await client.submit("hello", max_new_tokens=20)).result()
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.stats.keys() == expected.stats.keys()
        assert (await (await client.submit(messages=TURNS, max_new_tokens=20)).result()).text == (
            chat.text
        )
        job = await client.submit("hello", max_new_tokens=20)
        chunks = [chunk async for chunk in job.stream()]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert [chunk.text async for chunk in job.stream()] == [expected.text], "again at once"
        again = client.job(job.id)
        assert (await again.result()).text == expected.text
        assert await client.knows(job.id)
        assert not await client.submitted(job.id)
        assert (await client.pipeline())["stages"] == "2"
        assert await client.load() == (0, 0)
        assert "draft" in await client.workers()

    with_client(server.url, use)


def test_a_role_is_lost_if_its_holder_did_not_leave(
    server: PrivateBroker, client: redis.Redis
) -> None:
    control = RedisControl(server.url, Keys())
    control.set_pipeline({"stages": "4"})
    for stage in (1, 2, 3):
        assert control.claim(f"verify-{stage}", "token", {})
    control.release("verify-1", "token")
    control.release("verify-2", "token", leaves=True)

    async def use(asked: AsyncClient) -> None:
        assert await asked.lost() == ["verify-1"]

    with_client(server.url, use)
    control.close()


def test_many_jobs_share_one_read(cluster: ToyCluster, server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        jobs = [await client.submit("abc" + chr(97 + at), max_new_tokens=12) for at in range(20)]
        results = await asyncio.gather(*(job.result() for job in jobs))
        assert [len(result.token_ids) for result in results] == [12] * 20
        assert client.following == 0

    with_client(server.url, use)
    with Client(server.url) as plain:
        assert plain.load() == (0, 0)


def test_a_client_says_which_jobs_it_waits_for(
    cluster: ToyCluster,
    server: PrivateBroker,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowspec.async_client.FOLLOW_SECONDS", 0.005)
    followed = Keys().followed

    def until_when() -> dict[str, float]:
        return {job.decode(): when for job, when in client.zrange(followed, 0, -1, withscores=True)}

    async def use() -> None:
        async with AsyncClient(server.url, follows=True) as follows, AsyncClient(server.url) as no:
            long, cancelled, ended = [
                await follows.submit("hello", max_new_tokens=count) for count in (400, 400, 1)
            ]
            await no.submit("hello", max_new_tokens=1)
            before = until_when()
            assert before.keys() == {long.id, cancelled.id, ended.id}
            await cancelled.cancel()
            await ended.result()
            between = until_when()
            while until_when()[long.id] < between[long.id] + 50:
                await asyncio.sleep(0.001)
            after = until_when()
            assert after[long.id] >= between[long.id] + 50
            assert after[cancelled.id] < between[cancelled.id] + 25
            assert after[ended.id] < between[ended.id] + 25

    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await use()

    asyncio.run(bounded())
    left = until_when()
    assert until_when() == left


def test_a_new_job_joins_a_read_that_waits(
    cluster: ToyCluster, server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that blocks for longer than the test may take; nobody waits for its end."""
    monkeypatch.setattr("flowspec.transport.control.output_reader.MAX_BLOCK_SECONDS", 10 * SECONDS)
    monkeypatch.setitem(OPTIONS, "socket_timeout", 20 * SECONDS)

    async def use(client: AsyncClient) -> None:
        waiting = asyncio.create_task(client.job("1-1").result())  # there is no such job
        await asyncio.sleep(0.3)
        await (await client.submit("abc", max_new_tokens=4)).result()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    with_client(server.url, use)


def test_who_reads_an_output_again_from_further_back_misses_nothing(
    cluster: ToyCluster, server: PrivateBroker
) -> None:
    """While a read is under way that begins further on."""

    async def use(client: AsyncClient) -> None:
        outputs = client._control.outputs
        job = await client.submit("hello", max_new_tokens=4)
        await job.result()
        (entries,) = [await (await outputs.follow(job.id, "0")).take(5)]
        first, *_, last = [entry.cursor for entry in entries]
        outputs._feeds.clear()
        ahead = await outputs.follow(job.id, last)
        asked = dict.fromkeys(outputs._feeds, last)
        outputs.leave(ahead)
        back = await outputs.follow(job.id, first)
        (stream,) = outputs._feeds
        late = [stream.encode(), [[b"9999999999999-0", {b"kind": b"end"}]]]
        outputs._deliver(asked, [late])
        again = [entry.cursor for entry in await back.take(5)]
        assert again == [entry.cursor for entry in entries[1:]]
        outputs.leave(back)

    with_client(server.url, use)


def test_a_job_ends_early_by_cancel(cluster: ToyCluster, server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        job = await client.submit("hello", max_new_tokens=480)
        async for _ in job.stream():
            await job.cancel()
            break
        result = await job.result()
        assert result.finish_reason == "cancelled"
        assert 0 < len(result.token_ids) < 480
        assert result.stats["tokens"] == len(result.token_ids)

    with_client(server.url, use)


def test_a_wait_has_a_bound_and_the_job_goes_on(cluster: ToyCluster, server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        job = await client.submit("hello", max_new_tokens=480)
        with pytest.raises(JobTimeout, match=r"has not ended within 0.05 s; it goes on"):
            await job.result(timeout=0.05)
        assert len((await job.result(timeout=30)).token_ids) == 480

    with_client(server.url, use)
    with Client(server.url) as client:
        job = client.submit("hello", max_new_tokens=480)
        with pytest.raises(TimeoutError, match=f"job {job.id} has not ended within 0.05 s"):
            job.result(timeout=0.05)
        assert len(job.result(timeout=30).token_ids) == 480


def test_a_job_that_never_was_is_not_cancelled(cluster: ToyCluster, server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        with pytest.raises(JobError, match="there is no job 5-0"):
            await client.job("5-0").cancel()

    with_client(server.url, use)
    with Client(server.url) as client:
        with pytest.raises(JobError, match="there is no job 5-0"):
            client.job("5-0").cancel()
        ended = client.submit("hello", max_new_tokens=4)
        ended.result()
        ended.cancel()


def test_a_closed_client_refuses(cluster: ToyCluster, server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        job = await client.submit("hello", max_new_tokens=4)
        await client.close()
        for asked in (client.submit("hello"), job.result(), client.load()):
            with pytest.raises(ClientClosed, match="closed; make another one"):
                await asked

    with_client(server.url, use)
    client = Client(server.url)
    job = client.submit("hello", max_new_tokens=4)
    client.close()
    asks: list[Callable[[], object]] = [lambda: client.submit("hello"), job.result, client.load]
    for ask in asks:
        with pytest.raises(ClientClosed, match="closed; make another one"):
            ask()


def test_closing_a_client_ends_the_waits_of_other_threads(
    cluster: ToyCluster, server: PrivateBroker
) -> None:
    with ThreadPoolExecutor(2) as pool:
        client = Client(server.url)
        chunks = client.submit("hello", max_new_tokens=480).stream()
        next(chunks)
        waits: list[Future[Any]] = [
            pool.submit(client.job("1-1").result),
            pool.submit(list, chunks),
        ]
        client.close()
        for wait in waits:
            with pytest.raises(ClientClosed, match="closed; make another one"):
                wait.result(SECONDS)


def test_a_call_while_the_client_closes_is_refused_and_does_not_wait_for_ever(
    cluster: ToyCluster, server: PrivateBroker
) -> None:
    """Its event loop has ended, and is not closed yet: what is posted to it then is never run."""
    client = Client(server.url)
    inner = client._loop._loop
    close = inner.close
    refused = threading.Event()

    def call() -> None:
        with pytest.raises(ClientClosed, match="closed; make another one"):
            client.load()
        refused.set()

    def closing() -> None:
        threading.Thread(target=call, daemon=True).start()
        refused.wait(SECONDS)
        close()

    inner.close = closing  # type: ignore[method-assign]
    client.close()
    assert refused.is_set()


def test_a_stream_that_is_left_reads_no_further(cluster: ToyCluster, server: PrivateBroker) -> None:
    with Client(server.url) as client:
        job = client.submit("hello", max_new_tokens=480)
        for _ in job.stream():
            assert client._client.following == 1
            break
        assert client._client.following == 0
        assert len(job.result().token_ids) == 480, "it goes on where it was left"


def test_a_stream_that_is_closed_has_left_at_once(
    cluster: ToyCluster, server: PrivateBroker
) -> None:
    async def use(client: AsyncClient) -> None:
        chunks = (await client.submit("hello", max_new_tokens=480)).stream()
        await anext(chunks)
        assert client.following == 1
        await chunks.aclose()
        assert client.following == 0

    with_client(server.url, use)


def test_a_repeated_submission_gives_the_first_ones_output(
    cluster: ToyCluster, server: PrivateBroker
) -> None:
    async def use(client: AsyncClient) -> None:
        first = await client.submit("hello", max_new_tokens=8, idempotency_key="mine")
        text = (await first.result()).text
        second = await client.submit("hello", max_new_tokens=8, idempotency_key="mine")
        assert (await second.result()).text == text
        assert second.id == first.id

    with_client(server.url, use)


@pytest.mark.parametrize(
    ("given", "says", "cause"),
    [
        ({"prompt": "a", "strategy": "fastest"}, "unknown strategy", "refused"),
        ({"messages": TURNS[1:]}, "refuses the messages: it begins", "refused"),
        ({"prompt_ids": [2] * 600}, "the model's context is 512", "too_long"),
    ],
)
def test_a_failed_job_says_why_and_whose_fault_it_is(
    cluster: ToyCluster, server: PrivateBroker, given: dict[str, object], says: str, cause: str
) -> None:
    async def use(client: AsyncClient) -> None:
        job = await client.submit(**given)  # type: ignore[arg-type]
        with pytest.raises(JobFailed, match=says) as failed:
            await job.result()
        assert failed.value.cause == cause
        assert says in job.error

    with_client(server.url, use)


def test_wrong_arguments_are_refused_before_anything_is_sent(server: PrivateBroker) -> None:
    async def use(client: AsyncClient) -> None:
        with pytest.raises(JobError, match="temperature is 'hot'; expected a number"):
            await client.submit("a", temperature="hot")  # type: ignore[arg-type]

    with_client(server.url, use)


def test_no_broker_is_one_clear_error() -> None:
    async def run() -> None:
        async with AsyncClient("redis://localhost:1/0"):
            raise AssertionError("there is no broker")

    with pytest.raises(BrokerUnreachable, match="cannot reach the broker"):
        asyncio.run(run())


def test_an_unknown_fault_of_the_read_ends_every_wait(
    cluster: ToyCluster, server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(entries: object) -> None:
        raise TypeError("no such entries")

    async def use(client: AsyncClient) -> None:
        job = await client.submit("hello", max_new_tokens=20)
        with monkeypatch.context() as patch:
            patch.setattr("flowspec.transport.control.output_reader.output_entries", broken)
            with pytest.raises(BrokerError, match="cannot be read: TypeError"):
                await job.result()
        assert len((await job.result()).token_ids) == 20

    with_client(server.url, use)


def test_a_pipeline_without_scheduler_is_noticed(
    client: redis.Redis, server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.async_client.SILENCE_SECONDS", 0.3)

    async def use(client: AsyncClient) -> None:
        job = await client.submit("a")
        with pytest.raises(ClusterError, match="no scheduler serves the pipeline"):
            await job.result()

    with_client(server.url, use)


def test_a_scheduler_that_is_started_again_meanwhile_is_waited_for(
    server: PrivateBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.async_client.SILENCE_SECONDS", 0.3)
    claims = AsyncRedisControl.claims
    looks: list[Claims] = []

    with contextlib.ExitStack() as stack:

        async def look(control: AsyncRedisControl) -> Claims:
            looks.append(await claims(control))
            if len(looks) == 1:
                stack.enter_context(toy_pipeline(server.url))
            return looks[-1]

        async def use(client: AsyncClient) -> None:
            job = await client.submit("hello", max_new_tokens=20)
            assert len((await job.result()).token_ids) == 20

        monkeypatch.setattr(AsyncRedisControl, "claims", look)
        with_client(server.url, use)
    assert "scheduler" not in looks[0]


def test_output_between_two_looks_begins_the_count_anew(
    cluster: ToyCluster, server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(control: AsyncRedisControl) -> Claims:
        return {}

    async def use(client: AsyncClient) -> None:
        ended = await client.submit("hello", max_new_tokens=20)
        wanted = await ended.result()
        entries = await (await ended._control.outputs.follow(ended.id, "0")).take(SECONDS)
        taken = iter(([], entries[:1], [], entries[1:]))

        class Feed:
            async def take(self, seconds: float) -> list[OutputEntry]:
                return next(taken)

        async def follow(reader: OutputReader, job: str, cursor: str) -> Feed:
            return Feed()

        monkeypatch.setattr(OutputReader, "follow", follow)
        monkeypatch.setattr(OutputReader, "leave", lambda reader, feed: None)
        monkeypatch.setattr("flowspec.async_client.SILENCE_SECONDS", 0.0)
        monkeypatch.setattr(AsyncRedisControl, "claims", none)
        assert (await client.job(ended.id).result()).token_ids == wanted.token_ids

    with_client(server.url, use)


def test_a_broker_that_stays_away_is_told_once_and_ends_every_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowspec.transport.connections.async_client.RETRY_SECONDS", 0.5)
    monkeypatch.setattr("flowspec.async_client.RECONNECT_SECONDS", 2.0)
    monkeypatch.setattr("flowspec.async_client.AWAY_SECONDS", 0.2)

    async def run(broker: PrivateBroker) -> None:
        async with asyncio.timeout(SECONDS), AsyncClient(broker.url) as client:
            waits = [asyncio.create_task(client.job(f"{at}-1").result()) for at in (1, 2)]
            await asyncio.sleep(0.3)
            broker.stop()
            found = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(error, BrokerUnreachable) for error in found), found

    with PrivateBroker() as broker, structlog.testing.capture_logs() as said:
        asyncio.run(run(broker))
    told = [line["job"] for line in said if line["event"] == "broker away"]
    assert sorted(told) == ["1-1", "2-1"]
