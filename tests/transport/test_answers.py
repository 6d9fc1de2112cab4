"""Error answers that can come at any time, at every reader and writer: waited out, or one line."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from flowspec.core.protocol.codes import Code
from flowspec.errors import BrokerError, BrokerFull, BrokerUnreachable
from flowspec.transport.connections import pipelined_client
from flowspec.transport.connections.answers import error_of
from flowspec.transport.connections.async_client import AsyncBrokerClient
from flowspec.transport.connections.connection import connect, retrying
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import BrokerClient, DirectClient
from flowspec.transport.connections.server import Listen, PrivateBroker
from flowspec.transport.control.async_control import AsyncRedisControl
from flowspec.transport.control.output_reader import OutputReader
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link import incoming as module
from flowspec.transport.link.inbox import free_port
from flowspec.transport.link.incoming import open_incoming
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.link.log_reader import last_id
from flowspec.transport.wire.keys import JOBS, Keys
from tests.addresses import D0, S1
from tests.transport.conftest import Rig, commit, send
from tests.transport.proxy import Proxy
from tests.waiting import SECONDS, until

#: As Valkey 9.1 writes them, the kind of error if it goes on, and what the user's line says.
FOR_NOW = {
    "LOADING Valkey is loading the dataset in memory": (BrokerUnreachable, "still loading"),
    "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": (
        BrokerUnreachable,
        "script kill",
    ),
    "TRYAGAIN Multiple keys request during rehashing of slot": (BrokerUnreachable, "rehashing"),
    "CLUSTERDOWN The cluster is down": (BrokerUnreachable, "is down"),
    "READONLY You can't write against a read only replica.": (
        BrokerUnreachable,
        "give the URL of the primary",
    ),
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": (
        BrokerUnreachable,
        "has lost its primary",
    ),
    "UNBLOCKED force unblock from blocking operation, instance state changed": (
        BrokerUnreachable,
        "instance state changed",
    ),
    "NOREPLICAS Not enough good replicas to write.": (BrokerFull, "min-replicas-to-write"),
    "OOM command not allowed when used memory > 'maxmemory'.": (BrokerFull, "raise maxmemory"),
    "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist": (
        BrokerFull,
        "look at its disk",
    ),
    "ERR max number of clients reached": (BrokerUnreachable, "raise maxclients"),
}
FOR_GOOD = {
    "NOAUTH Authentication required.": (BrokerUnreachable, "refused the password"),
    "WRONGPASS invalid username-password pair or user is disabled.": (
        BrokerUnreachable,
        "refused the password",
    ),
    "NOPERM User u has no permissions to run the 'xadd' command": (
        BrokerError,
        "'xadd'.*; `flowspec acl` writes users",
    ),
    "ERR unknown command 'SADD', with args beginning with: 'set' 'a' ": (
        BrokerError,
        "lacks a command: .*unknown command 'SADD', .*; it needs all of Redis",
    ),
    "ERR ACL failure in script: User u has no permissions to run the 'xadd' command": (
        BrokerError,
        "does not allow this user a command: .*'xadd'",
    ),
    "MOVED 3999 10.0.0.7:6381": (BrokerError, "a node of a cluster"),
    "CROSSSLOT Keys in request don't hash to the same slot": (BrokerError, "a node of a cluster"),
    "WRONGTYPE Operation against a key holding the wrong kind of value": (
        BrokerError,
        "refused a command: .*WRONGTYPE",
    ),
}


@pytest.fixture
def proxy(
    server: PrivateBroker, client: redis.Redis, tmp_path: Path
) -> Iterator[tuple[Proxy, str]]:
    """A way to the empty broker on which commands can be refused, and its URL."""
    parts = urlsplit(server.url)
    proxy = Proxy(parts.path, tmp_path / "p")
    yield proxy, f"unix://:{parts.password}@{tmp_path / 'p'}"
    proxy.close()


@pytest.mark.parametrize("kind", [BrokerClient, DirectClient, PipelinedClient])
def test_commands_are_sent_again_and_carried_out_once(
    proxy: tuple[Proxy, str], client: redis.Redis, kind: type[BrokerClient]
) -> None:
    refusing, url = proxy
    user = kind(url)
    for answer in FOR_NOW:
        client.delete("set", "stream")
        refusing.refuse(answer, 2)
        assert user.run([("SADD", "set", "a")]) == [1], answer
        refusing.refuse(answer, 2)
        assert user.run([("SADD", "set", "b"), ("SADD", "set", "c")], atomic=True) == [1, 1], answer
        refusing.refuse(answer, 2)
        assert user.call(lambda client: client.scard("set")) == 3, answer
        refusing.refuse(answer, 2)
        user.once(("XADD", "stream", "*", "n", 1))
        assert client.xlen("stream") == 1, answer
        assert refusing.to_refuse == 0
    for answer, (error, said) in FOR_GOOD.items():
        for call in (
            lambda: user.run([("SADD", "set", "d")]),
            lambda: user.run([("SADD", "set", "d"), ("SADD", "set", "e")], atomic=True),
            lambda: user.call(lambda client: client.sadd("set", "d")),
            lambda: user.once(("SADD", "set", "d")),
        ):
            refusing.refuse(answer, 1)
            with pytest.raises(error, match=said):
                call()
            assert client.scard("set") == 3, answer
            assert user.run([("PING",)]) in ([b"PONG"], [True]), f"{answer}: a reply was left over"
    user.close()


@pytest.mark.parametrize("atomic", [False, True])
def test_batches_under_way_are_sent_again_in_their_order(
    proxy: tuple[Proxy, str], client: redis.Redis, atomic: bool
) -> None:
    refusing, url = proxy
    user = PipelinedClient(url)
    for answer in FOR_NOW:
        client.delete("list")
        refusing.refuse(answer, 3)
        for number in range(3):
            commands = [("RPUSH", "list", number)] * (2 if atomic else 1)
            user.post(commands, atomic=atomic)
        for _ in range(3):
            assert all(isinstance(one, int) for one in user.collect()), answer
        assert refusing.to_refuse == 0
        found = [int(number) for number in client.lrange("list", 0, -1)]
        assert found == [number for number in range(3) for _ in range(1 + atomic)], answer
    for answer, (error, said) in FOR_GOOD.items():
        refusing.refuse(answer, 1)
        user.post([("RPUSH", "list", 0)] * (2 if atomic else 1), atomic=atomic)
        user.post([("RPUSH", "list", 1)])
        for refused in user.collect():
            assert isinstance(refused, redis.RedisError)
            assert re.search(said, str(told := error_of(refused, "h"))), answer
            assert type(told) is error
        assert [type(one) for one in user.collect()] == [int], answer
    user.close()


#: Adds a number behind the one before it; GAP if that is not there, FULL at the key's cap.
NEXT = """
local size = redis.call('LLEN', KEYS[1])
if size > tonumber(ARGV[1]) then return 1 end
if size < tonumber(ARGV[1]) then return %d end
redis.call('RPUSH', KEYS[1], ARGV[1])
return 0
"""


@pytest.mark.parametrize("code", [Code.GAP, Code.STALE, Code.FULL])
@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_what_missed_a_refused_command_is_sent_again(
    proxy: tuple[Proxy, str], client: redis.Redis, code: Code, bundled: bool, lost: int
) -> None:
    refusing, url = proxy
    user = PipelinedClient(url)
    text = NEXT % code
    if bundled:
        text = text.replace("return 0", "return {0}").replace(f"return {int(code)}", "return {%d}")
        text %= code
    for answer in FOR_NOW:
        client.delete("list", "set")
        refusing.refuse(answer, 1)
        user.post([("EVAL", text, 1, "list", 0)])
        user.post([("EVAL", text, 1, "list", 1)])
        user.post([("SADD", "set", 1)])
        until(lambda: refusing.to_refuse == 0 and client.scard("set"))
        refusing.lose_replies(lost)
        user.post([("EVAL", text, 1, "list", 2)])
        answers = [user.collect()[0] for _ in range(4)]
        assert client.lrange("list", 0, -1) == [b"0", b"1", b"2"], answer
        assert code not in [one[0] if isinstance(one, list) else one for one in answers], answer
    user.close()


def test_what_misses_something_without_a_refusal_is_told(
    proxy: tuple[Proxy, str], client: redis.Redis
) -> None:
    _, url = proxy
    user = PipelinedClient(url)
    for number in (1, 0):
        user.post([("EVAL", NEXT % Code.GAP, 1, "list", number)])
    assert [user.collect(), user.collect()] == [[Code.GAP], [Code.OK]]
    user.close()


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("patient", [True, False])
def test_a_worker_reads_on(
    proxy: tuple[Proxy, str],
    client: redis.Redis,
    near: bool,
    patient: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing, url = proxy
    monkeypatch.setattr(module, "NEAR_SECONDS", 10.0 if near else 0.0)
    incoming = open_incoming(url, {"s": "0-0"}, patient=patient)
    for number, answer in enumerate(FOR_NOW):
        refusing.refuse(answer, 2)
        client.xadd("s", {"n": 2 * number})
        client.xadd("s", {"n": 2 * number + 1})
        found: list[int] = []

        def complete(found: list[int] = found) -> bool:
            arrived = incoming.take(waited=True) if incoming.news else ()
            found += [int(flat[1]) for _, entries in arrived for _, flat in entries]
            return len(found) == 2 and refusing.to_refuse == 0

        until(complete)
        assert found == [2 * number, 2 * number + 1], answer
    incoming.close()
    for answer, (error, said) in FOR_GOOD.items():
        incoming = open_incoming(url, {"s": "0-0"}, patient=patient)
        until(partial(getattr, incoming, "news"))
        assert incoming.take(waited=True)
        refusing.refuse(answer, 1)
        client.xadd("s", {"n": 0})  # ends the read that is under way
        with pytest.raises(error, match=said):
            while True:
                incoming.take(waited=True)
        incoming.close()


def test_asynchronous_clients_read_and_write_on(
    proxy: tuple[Proxy, str], client: redis.Redis
) -> None:
    refusing, url = proxy

    async def check() -> None:
        user = AsyncBrokerClient(url)
        await user.open()
        for answer in FOR_NOW:
            refusing.refuse(answer, 2)
            assert await user.run(("SADD", "set", answer)) == [1]
            refusing.refuse(answer, 2)
            await user.once(("XADD", "stream", "*", "n", 1))
        assert client.xlen("stream") == len(FOR_NOW)
        for answer, (error, said) in FOR_GOOD.items():
            for call in (user.run, user.once):
                refusing.refuse(answer, 1)
                with pytest.raises(error, match=said):
                    await call(("SADD", "set", "z"))
                assert await user.run(("PING",)) in ([b"PONG"], [True])
        reader = OutputReader(user, Keys())
        for number, answer in enumerate(FOR_NOW):
            feed = await reader.follow("1-1", "0" if not number else f"{number}-1")
            refusing.refuse(answer, 2)
            client.xadd(Keys().out("1-1"), {"n": number}, id=f"{number + 1}-1")
            (entry,) = await feed.take(30.0)
            assert entry.fields == {"n": str(number)}, answer
            reader.leave(feed)
        await reader.close()
        for answer, (error, said) in FOR_GOOD.items():
            feed = await reader.follow("1-1", f"{len(FOR_NOW)}-1")
            refusing.refuse(answer, 1)
            client.xadd(Keys().out("1-1"), {"n": 0})
            with pytest.raises(error, match=said):
                while True:
                    await feed.take(30.0)
            assert refusing.to_refuse == 0
        await reader.close()
        await user.close()

    asyncio.run(check())


def test_an_asynchronous_client_submits_once(proxy: tuple[Proxy, str], client: redis.Redis) -> None:
    refusing, url = proxy

    async def check() -> None:
        control = AsyncRedisControl(url, Keys())
        await control.open()
        for number, answer in enumerate(FOR_NOW):
            refusing.refuse(answer, 3)
            await control.submit({"prompt": answer})
            assert client.xlen(JOBS) == number + 1, answer
        for answer, (error, said) in FOR_GOOD.items():
            refusing.refuse(answer, 1)
            with pytest.raises(error, match=said):
                await control.submit({"prompt": answer})
        assert client.xlen(JOBS) == len(FOR_NOW)
        await control.close()

    asyncio.run(check())


def test_a_refused_command_waits_for_a_server_that_is_away_next(
    proxy: tuple[Proxy, str], client: redis.Redis
) -> None:
    """A primary that became a replica, and an address that leads nowhere for a while."""
    refusing, url = proxy
    target = refusing.target

    def leave() -> threading.Timer:
        refusing.refuse("READONLY You can't write against a read only replica.", 1)
        refusing.target = f"{target}.gone"
        back = threading.Timer(1.0, setattr, [refusing, "target", target])
        back.start()
        return back

    for kind in (BrokerClient, DirectClient):
        user = kind(url)
        back = leave()
        user.once(("SADD", "set", kind.__name__))
        back.join()
        user.close()

    async def check() -> None:
        user = AsyncBrokerClient(url)
        await user.open()
        back = leave()
        await user.once(("SADD", "set", "asynchronous"))
        back.join()
        await user.close()

    asyncio.run(check())
    assert client.scard("set") == 3


def test_a_server_that_cannot_save_is_read(proxy: tuple[Proxy, str], client: redis.Redis) -> None:
    """It refuses writes, and PING."""
    refusing, url = proxy
    client.xadd("s", {"n": 1})

    async def check() -> None:
        user = AsyncBrokerClient(url)
        await user.open()
        await user.close()

    refusing.refuse("MISCONF Valkey is configured to save RDB snapshots, but it can't", 1000)
    refusing.only = (b"PING", b"XADD")
    asyncio.run(check())
    incoming = open_incoming(url, {"s": "0-0"})
    assert until(lambda: incoming.take(waited=True))
    incoming.close()
    assert refusing.to_refuse == 1000


def test_a_reader_begins_behind_what_was_there_before(
    proxy: tuple[Proxy, str], client: redis.Redis
) -> None:
    refusing, url = proxy
    user = BrokerClient(url)
    assert last_id(user, "s") == "0-0"
    client.xadd("s", {"n": 1}, id="5-5")
    for answer in FOR_NOW:
        refusing.refuse(answer, 2)
        assert last_id(user, "s") == "5-5", answer
    refusing.refuse("NOPERM User u has no permissions to run the 'xinfo' command", 1)
    with pytest.raises(BrokerError, match="'xinfo'"):
        last_id(user, "s")
    user.close()


def test_a_scheduler_reads_submissions_on(proxy: tuple[Proxy, str], client: redis.Redis) -> None:
    refusing, url = proxy
    control = RedisControl(url, Keys())
    control.join_intake()
    for answer in FOR_NOW:
        client.xadd(JOBS, {"prompt": answer})
        refusing.refuse(answer, 3)
        (intake,) = until(lambda: control.read_intake(1.0))
        assert intake.fields == {"prompt": answer}
        control.acknowledge([intake.job])
    control.close()


def test_who_connects_first_waits_for_a_server_that_answers_and_not_for_one_that_is_away() -> None:
    answers = iter(["LOADING Valkey is loading the dataset in memory", *list(FOR_NOW)[:3]])

    def ask() -> str:
        for answer in answers:
            raise parsed(answer)
        return "run id"

    def lose() -> str:
        raise redis.ConnectionError("Error 111 connecting to h:1. Connection refused.")

    assert retrying(ask, "redis://h:1", away_seconds=0.0) == "run id"
    with pytest.raises(BrokerUnreachable, match=r"cannot reach .*: Connection refused$"):
        retrying(lose, "redis://h:1", away_seconds=0.0)


def test_a_line_says_what_a_server_wants_that_goes_on_refusing() -> None:
    for answer, (kind, said) in (FOR_NOW | FOR_GOOD).items():
        for text in (
            answer,
            f"EXECABORT Transaction discarded because of: {answer}",
            f"ERR Error running script (call to f_1): @user_script:3: -{answer}",
        ):
            error = error_of(parsed(text), "redis://h:1")
            assert type(error) is kind, text
            assert re.search(said, str(error)), text
            assert str(error).startswith("the broker at redis://h:1 "), text


def parsed(answer: str) -> redis.RedisError:
    """As redis-py reads it."""
    error: redis.RedisError = redis.connection.DefaultParser.parse_error(answer)  # type: ignore[no-untyped-call]
    return error


# ---- a server that refuses by itself -------------------------------------------------------------


@pytest.fixture
def full(server: PrivateBroker) -> Iterator[Callable[[bool], None]]:
    """Fills the broker, or makes room again."""
    client = connect(server.url)
    before = str(client.config_get("maxmemory")["maxmemory"])

    def fill(is_full: bool) -> None:
        client.config_set("maxmemory", 1 if is_full else before)

    yield fill
    fill(False)
    client.close()


def test_a_worker_waits_for_a_full_broker(
    server: PrivateBroker, client: redis.Redis, full: Callable[[bool], None]
) -> None:
    rig = Rig(url=server.url)
    control = rig.control()
    draft = LiveLink(server.url, Keys(), D0, 2)
    stage = rig.link(S1)
    job = rig.start(control, draft)
    full(True)
    room = threading.Timer(1.0, full, [False])
    room.start()
    draft.write([send(S1, job, 1)])
    draft.write([commit(job, 1, seq=2)])
    draft.write([send(S1, job, 3)])
    found: list[int] = []

    def complete() -> bool:
        assert draft.read(0.05).unwritten == ()
        found.extend(envelope.seq for envelope in stage.read(0.05).envelopes)
        return len(found) == 3

    until(complete)
    room.join()
    assert found == [1, 2, 3]
    draft.close()
    rig.close()


def test_outputs_of_a_full_broker_are_read(
    server: PrivateBroker, client: redis.Redis, full: Callable[[bool], None]
) -> None:
    for job in ("1-1", "2-2"):
        client.xadd(Keys().out(job), {"n": job})

    async def check() -> None:
        user = AsyncBrokerClient(server.url)
        reader = OutputReader(user, Keys())
        first = await reader.follow("1-1", "0")
        assert len(await first.take(30.0)) == 1
        full(True)
        second = await reader.follow("2-2", "0")
        (entry,) = await second.take(30.0)
        assert entry.fields == {"n": "2-2"}
        full(False)
        await reader.close()
        await user.close()

    asyncio.run(check())


def test_a_worker_gives_up_a_broker_that_stays_full_in_one_line(
    server: PrivateBroker,
    client: redis.Redis,
    full: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient = partial(retrying, seconds=0.3)
    monkeypatch.setattr(pipelined_client, "retrying", impatient)
    rig = Rig(url=server.url)
    draft = LiveLink(server.url, Keys(), D0, 2)
    job = rig.start(rig.control(), draft)
    full(True)
    for seq in (1, 2, 3):
        draft.write([send(S1, job, seq)])
    with pytest.raises(BrokerFull, match="out of memory; raise maxmemory"):
        until(lambda: draft.read(0.05).unwritten)
    with pytest.raises(BrokerFull, match="out of memory; raise maxmemory"):
        draft.close()
    full(False)
    rig.close()


@dataclass(frozen=True)
class Failover:
    """A replica, and how it becomes the primary to which ``url`` leads."""

    url: str
    new: redis.Redis
    promote: Callable[[], None]


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[Failover]:
    """Connections to the old primary stay open, as its address leads to another server."""
    ports = free_port("127.0.0.1"), free_port("127.0.0.1")
    with (
        PrivateBroker(listen=Listen("127.0.0.1", ports[0])) as first,
        PrivateBroker(listen=Listen("127.0.0.1", ports[1])) as second,
    ):
        old, new = connect(first.url), connect(second.url)
        secret = str(urlsplit(first.url).password)
        new.config_set("requirepass", secret)
        for server in (old, new):
            server.config_set("masterauth", secret)
            server.config_set("repl-diskless-sync-delay", 0)
        new.auth(secret)
        new.replicaof("127.0.0.1", ports[0])
        until(lambda: new.info("replication")["master_link_status"] == "up")
        proxy = Proxy(("127.0.0.1", ports[0]), tmp_path / "p")

        def promote() -> None:
            old.set("written", 1)
            until(lambda: new.exists("written"))
            new.replicaof("NO", "ONE")
            proxy.target = ("127.0.0.1", ports[1])
            old.replicaof("127.0.0.1", ports[1])

        yield Failover(f"unix://:{secret}@{tmp_path / 'p'}", new, promote)
        proxy.close()
        for server in (old, new):
            server.close()


def test_clients_outlive_a_failover(failover: Failover) -> None:
    async def check() -> None:
        user = AsyncBrokerClient(failover.url)
        reader = OutputReader(user, Keys())
        feed = await reader.follow("1-1", "0")
        await user.run(("XADD", Keys().out("1-1"), "1-1", "n", 1))
        assert len(await feed.take(30.0)) == 1
        failover.promote()
        await user.run(("XADD", Keys().out("1-1"), "2-1", "n", 2))
        (entry,) = await feed.take(30.0)
        assert entry.fields == {"n": "2"}
        assert failover.new.xlen(Keys().out("1-1")) == 2
        await reader.close()
        await user.close()

    asyncio.run(check())


def test_a_worker_notices_a_failover(failover: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew: the end of what it has written may be lost."""
    # Only a read that waits is ended by the demotion, which may come late on a slow machine.
    monkeypatch.setattr("flowspec.transport.link.pending_read.MAX_BLOCK_SECONDS", SECONDS)
    writes = PipelinedClient(failover.url)
    writes.call(lambda client: client.ping())  # leaves a connection in the pool
    link = LiveLink(failover.url, Keys(), D0, 2)
    failover.promote()
    writes.post([("SADD", "set", 1)])
    with pytest.raises(BrokerUnreachable, match="was restarted; what ran on it is lost"):
        writes.collect()
    with pytest.raises(BrokerUnreachable, match="was restarted; what ran on it is lost"):
        until(lambda: link.read(0.05) and False)
    for end in (writes, link):
        end.close()
