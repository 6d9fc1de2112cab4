"""Pitfalls of Redis and redis-py, one test each."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis
from redis.connection import PythonRespSerializer

from flowspec.client import Client
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.messages import Close
from flowspec.core.run.key import RunKey
from flowspec.errors import BrokerError, BrokerUnreachable, ConfigError, FlowSpecError, GapError
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.transport.base import TRIM_BYTES, TRIM_ENTRIES, PutRows
from flowspec.transport.connections import connection, redis_client
from flowspec.transport.connections.async_client import AsyncBrokerClient
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS, connect, redact
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import BrokerClient, Command
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.inbox import free_port
from flowspec.transport.wire import codec
from flowspec.transport.wire.keys import JOBS, Keys
from tests.addresses import D0, S1, S2
from tests.clients import RedisControlAndClient
from tests.transport.conftest import Rig, commit, send
from tests.transport.proxy import Proxy
from tests.waiting import seconds_of


@pytest.fixture
def proxy(
    server: PrivateBroker, client: redis.Redis, tmp_path: Path
) -> Iterator[tuple[Proxy, str]]:
    """A lossy connection to the broker, and its URL."""
    parts = urlsplit(server.url)
    proxy = Proxy(parts.path, tmp_path / "p")
    yield proxy, f"unix://:{parts.password}@{tmp_path / 'p'}"
    proxy.close()


@pytest.mark.parametrize("times", [1, 2, 4])
def test_writes_under_way_outlive_repeated_losses(proxy: tuple[Proxy, str], times: int) -> None:
    lossy, url = proxy
    client = PipelinedClient(url)
    lossy.lose_replies(times)
    client.post([("SADD", "set", "a")])
    client.post([("SADD", "set", "b")])
    assert len(client.collect()) == len(client.collect()) == 1
    assert lossy.lost == times
    assert set(client.run([("SMEMBERS", "set")])[0]) == {b"a", b"b"}
    client.close()


def started(url: str) -> tuple[Rig, EmulatedLink, str]:
    rig = Rig(url=url)
    draft = rig.link(D0)
    job = rig.start(rig.control(), draft)
    assert isinstance(draft, EmulatedLink)
    return rig, draft, job


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_reply_never_makes_two_entries(
    proxy: tuple[Proxy, str], client: redis.Redis, times: int
) -> None:
    """redis-py retries ten times by default, and would write twice; the script prevents it."""
    lossy, url = proxy
    _, draft, job = started(url)
    lossy.lose_replies(times)
    assert draft.write([send(S1, job, 1), send(S2, job, 1)]) == [Code.DUP, Code.DUP]
    assert lossy.lost == times
    assert client.xlen(Keys().log(S1)) == client.xlen(Keys().log(S2)) == 1


def test_a_lost_reply_to_rows_and_their_envelope_makes_one_segment(
    server: PrivateBroker, client: redis.Redis, proxy: tuple[Proxy, str]
) -> None:
    lossy, url = proxy
    rig, _, job = started(server.url)
    stage = rig.link(S2)
    sender = EmulatedLink(url, Keys(), S1, 2)
    rows = np.ones((2, 3), np.float32)
    sender.write([send(S2, job, 1, sender=S1)])
    lossy.lose_replies(1)
    assert (
        sender.write([PutRows(S2, RunKey(job, 1), 7, rows), send(S2, job, 2, sender=S1)])[1]
        is Code.DUP
    )
    assert lossy.lost == 1
    assert [envelope.seq for envelope in stage.read(1.0).envelopes] == [1, 2]
    assert (stage.take_rows(RunKey(job, 1), 7) == rows).all()
    sender.close()


def test_a_lost_reply_never_commits_twice(proxy: tuple[Proxy, str], client: redis.Redis) -> None:
    lossy, url = proxy
    _, draft, job = started(url)
    lossy.lose_replies(1)
    assert draft.write([commit(job)]) == [Code.DUP]
    assert client.xlen(Keys().out(job)) == 1


def test_a_submission_is_never_sent_twice_by_itself(
    proxy: tuple[Proxy, str], client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy, url = proxy
    original = AsyncBrokerClient.run

    async def run(self: AsyncBrokerClient, *commands: Command) -> list[object]:
        answers = await original(self, *commands)
        lossy.lose_replies(1)
        return answers

    monkeypatch.setattr(AsyncBrokerClient, "run", run)  # the PING
    with pytest.raises(BrokerUnreachable):
        RedisControlAndClient(url, Keys()).submit({"prompt": "once"})
    assert client.xlen(JOBS) == 1


def test_a_lost_reply_of_a_group_read_skips_no_submission(proxy: tuple[Proxy, str]) -> None:
    """Entries of a lost reply are pending for this consumer; a later '>' does not return them."""
    lossy, url = proxy
    control = RedisControlAndClient(url, Keys())
    control.join_intake()
    control.read_intake(0.01)
    first = control.submit({"prompt": "first"})
    original = BrokerClient.once

    def losing(self: BrokerClient, command: tuple[object, ...]) -> object:
        lossy.lose_replies(1)
        return original(self, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BrokerClient, "once", losing)
        assert control.read_intake(1.0) == [], (
            "unknown: the next read starts with our pending entries"
        )
    second = control.submit({"prompt": "second"})
    assert [intake.job for intake in control.read_intake(1.0)] == [first]
    control.acknowledge([first])
    assert [intake.job for intake in control.read_intake(1.0)] == [second]


def test_redis_py_retries_nothing_by_itself(server: PrivateBroker) -> None:
    client = connect(server.url)
    assert client.get_connection_kwargs()["retry"].get_retries() == 0
    assert client.connection_pool.get_connection().retry.get_retries() == 0
    client.close()


def test_a_blocking_read_is_shorter_than_the_sockets_patience(
    server: PrivateBroker, client: redis.Redis
) -> None:
    """With the default timeout of 5 s a longer idle read hangs for a minute, then fails."""
    assert connect(server.url).get_connection_kwargs()["socket_timeout"] > MAX_BLOCK_SECONDS + 1
    link = EmulatedLink(server.url, Keys(), S1, 2)
    assert seconds_of(lambda: link.read(60.0)) > MAX_BLOCK_SECONDS - 0.1
    link.close()


def test_replies_keep_the_shape_the_code_reads(client: redis.Redis) -> None:
    client.xadd("stream", {"a": "1"})
    found = client.xread({"stream": "0"})
    assert isinstance(found, list)
    assert found[0][0] == b"stream"
    assert found[0][1][0][1] == {b"a": b"1"}
    assert client.xread({"stream": "$"}) == []


def test_commands_are_packed_in_python(server: PrivateBroker) -> None:
    client = connect(server.url)
    assert isinstance(client.connection_pool.get_connection()._command_packer, PythonRespSerializer)
    client.close()


def test_rows_and_their_envelope_wake_their_reader_once(
    server: PrivateBroker, client: redis.Redis
) -> None:
    """Two separate writes would cost the reader a second round trip."""
    _, draft, job = started(server.url)
    stage = EmulatedLink(server.url, Keys(), S2, 2)
    rows = np.zeros((16, 512), np.float32)
    for number in range(1, 40):
        writer = threading.Timer(
            0.005,
            draft.write,
            ([PutRows(S2, RunKey(job, 1), number, rows), send(S2, job, number)],),
        )
        writer.start()
        assert len(stage.read(2.0).envelopes) == 1, "the first thing read has rows and envelope"
        writer.join()
    stage.close()


def test_large_rows_arrive_whole(server: PrivateBroker, client: redis.Redis) -> None:
    _, draft, job = started(server.url)
    stage = EmulatedLink(server.url, Keys(), S2, 2)
    rows = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    draft.write([PutRows(S2, RunKey(job, 1), 1, rows), send(S2, job, 1)])
    stage.read(1.0)
    assert (stage.take_rows(RunKey(job, 1), 1) == rows).all()
    stage.close()


def test_scripts_a_server_forgot_are_loaded_again(
    server: PrivateBroker, client: redis.Redis
) -> None:
    _, draft, job = started(server.url)
    client.script_flush()
    assert draft.write([send(S1, job, 1), send(S1, job, 2)]) == [Code.OK, Code.OK]


def test_a_server_that_lost_its_memory_is_not_taken_for_the_old_one() -> None:
    """Its streams restart, and a cursor ahead of them would wait indefinitely."""
    with PrivateBroker() as broker:
        link = EmulatedLink(broker.url, Keys(), S1, 2)
        assert broker.directory is not None
        config = broker.directory / "conf"
        binary = Path(f"/proc/{broker.pid}/exe").resolve()
        assert broker._process is not None
        broker._process.kill()
        broker._process.wait()
        import subprocess

        broker._process = subprocess.Popen([str(binary), str(config)])
        with pytest.raises(BrokerUnreachable, match="was restarted; what ran on it is lost"):
            for _ in range(100):
                link.read(0.05)


def test_a_broker_that_is_gone_is_one_line_within_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "FIRST_SECONDS", 0.5)
    with pytest.raises(
        BrokerUnreachable, match="cannot reach the broker at unix://:\\*\\*\\*@"
    ) as raised:
        RedisControl(f"unix://:secret@{tmp_path}/none", Keys())
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_wrong_password_is_said_at_once(
    server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "FIRST_SECONDS", 3600.0)  # as long as it is tried again
    wrong = server.url.replace(urlsplit(server.url).password or "", "wrong")
    with pytest.raises(BrokerUnreachable, match="refused the password"):
        RedisControl(wrong, Keys())


@pytest.mark.parametrize(
    "url", ["http://x", "localhost:6379", "redis://h:port", "redis://[::1", ""]
)
def test_what_is_no_broker_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        connect(url)


@pytest.mark.parametrize(
    "url", ["redis://h/abc", "rediss://:secret@h:1/-1?timeout=1", "redis://h/0/1"]
)
def test_a_database_that_is_no_number_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="ends with no number of a database") as refused:
        connect(url)
    assert "secret" not in str(refused.value)
    connect("redis://h/3?socket_timeout=1").close()


def test_passwords_are_never_shown() -> None:
    assert redact("redis://user:pa@ss@host:1/0") == "redis://user:***@host:1/0"
    assert redact("unix://:pw@/s") == "unix://:***@/s"
    assert redact("redis://host") == "redis://host"


def test_every_redis_error_has_one_of_ours() -> None:
    for name in dir(redis.exceptions):
        kind = getattr(redis.exceptions, name)
        if isinstance(kind, type) and issubclass(kind, redis.RedisError):
            error = (
                kind("1 host:1")
                if kind is not redis.exceptions.ExternalAuthProviderError
                else kind("1")
            )
            assert isinstance(connection.translate(error, "redis://h"), BrokerError), name


# ---- what is on the wire and in the logs ---------------------------------------------------------


def test_malformed_entries_are_refused_counted_and_survived(
    server: PrivateBroker, client: redis.Redis
) -> None:
    _, draft, job = started(server.url)
    stage = EmulatedLink(server.url, Keys(), S1, 2)
    log = Keys().log(S1)
    rows = Keys().rows(S1)
    close = codec.encode(Close(RunKey(job, 1)))
    client.xadd(log, {"f": "d0", "q": 1, "m": b"\xc1"})
    client.xadd(log, {"f": "d0", "m": close})
    client.xadd(log, {"f": b"\xff", "q": "1", "m": close})
    client.xadd(log, {"f": "d1", "q": "1", "m": close})
    client.xadd(log, {"f": "d0", "q": "-1", "m": close})
    client.xadd(log, {"f": "d0", "q": "1", "m": close, "t": "1.5 nobody"})
    pickled = b"\x80\x04pickle"
    client.xadd(rows, {"j": job, "e": 1, "s": 1, "d": pickled, "c": zlib.crc32(pickled)})
    client.xadd(rows, {"j": job, "e": 1, "s": 1, "d": codec.encode_rows(np.ones(2)), "c": 5})
    client.execute_command("XADD", log, "*", *["q", "1"] * 3000)
    client.xadd(log, {"f": "d0", "q": "1", "m": codec.encode(Close(RunKey("j" * 65, 1)))})
    draft.write([send(S1, job, 1)])
    delivery = stage.read(1.0)
    assert len(delivery.refused) == 10
    assert len(delivery.envelopes) == 1
    stage.close()


def test_rows_of_runs_that_nobody_names_are_bounded(
    server: PrivateBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are dropped; those of a run that a message has named are not."""
    monkeypatch.setattr("flowspec.transport.link.log_reader.EARLY_ROWS", 3)
    _, draft, job = started(server.url)
    stage = EmulatedLink(server.url, Keys(), S1, 2)
    draft.write([send(S1, job, 1)])
    stage.read(1.0)
    ours = RunKey(job, 1)
    rows = np.ones((1, 2), np.float32)
    draft.write([PutRows(S1, ours, number, rows) for number in range(5)])
    draft.write([PutRows(S1, RunKey("9-9", 1), number, rows) for number in range(5)])
    stage.read(1.0)
    for number in range(5):
        assert stage.take_rows(ours, number).shape == (1, 2)
    for number in (0, 1):
        with pytest.raises(GapError):
            stage.take_rows(RunKey("9-9", 1), number)
    for number in (2, 3, 4):
        stage.take_rows(RunKey("9-9", 1), number)
    monkeypatch.setattr("flowspec.transport.link.log_reader.EARLY_BYTES", 100)
    draft.write([PutRows(S1, RunKey("9-8", 1), number, rows) for number in range(3)])
    stage.read(1.0)
    with pytest.raises(GapError):
        stage.take_rows(RunKey("9-8", 1), 0)
    stage.take_rows(RunKey("9-8", 1), 2)
    stage.close()


def test_what_was_read_is_trimmed_and_what_was_not_is_kept(
    server: PrivateBroker, client: redis.Redis
) -> None:
    rig, draft, job = started(server.url)
    stage = rig.link(S1)
    from flowspec.core.protocol.messages import Open
    from flowspec.core.run.sampling import Sampling

    draft.write([send(S1, job, 1, Open(RunKey(job, 1), 2, 9, Sampling())), send(S1, job, 2)])
    draft.write([PutRows(S1, RunKey(job, 1), 5, np.zeros((2, 2), np.float32))])
    stage.read(1.0)
    stage.read(0.0)
    assert client.xlen(Keys().rows(S1)) == 1, "few entries are not worth a trim"
    assert client.xlen(Keys().log(S1)) == 2
    draft.write([PutRows(S1, RunKey(job, 1), 6, np.zeros((1, TRIM_BYTES), np.float16))])
    stage.read(1.0)
    stage.read(0.0)
    assert client.xlen(Keys().rows(S1)) == 0, "many bytes are"
    draft.write([send(S1, job, seq) for seq in range(3, TRIM_ENTRIES + 1)])
    stage.read(1.0)
    stage.read(0.0)
    assert client.xlen(Keys().log(S1)) == 0, "many are, while their run is open"
    assert client.hget(Keys().run(RunKey(job, 1)), "r:2") == str(TRIM_ENTRIES).encode()
    draft.write([send(S1, job, TRIM_ENTRIES + 1)])
    draft.write([PutRows(S1, RunKey(job, 1), 7, np.zeros((2, 2), np.float32))])
    stage.read(1.0)
    draft.write([send(S1, job, TRIM_ENTRIES + 2)])
    stage.forget(RunKey(job, 1))
    stage.read(0.0)
    assert client.xlen(Keys().log(S1)) == 1, "unread entries are never trimmed"
    assert client.xlen(Keys().rows(S1)) == 0, "all that was read is, of a reader without a run"
    stage.read(1.0)
    stage.read(0.0)
    assert client.xlen(Keys().log(S1)) == 0


def test_rows_that_came_while_nobody_read_are_removed_by_the_next_reader(
    server: PrivateBroker, client: redis.Redis
) -> None:
    """Its successors' rows may all come through an inbox: nothing here is read again."""
    rig, draft, job = started(server.url)
    draft.write([PutRows(S1, RunKey(job, 1), 5, np.zeros((2, 2), np.float32))])
    stage = rig.link(S1)
    assert client.xlen(Keys().rows(S1)) == 1
    stage.read(0.0)
    assert client.xlen(Keys().rows(S1)) == 0


def test_a_full_stream_of_rows_is_said_and_never_trimmed(
    server: PrivateBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.rehearse.emulated_link.ROWS_CAP", 10)
    _, draft, job = started(server.url)
    op = PutRows(S2, RunKey(job, 1), 1, np.zeros((1, 1), np.float32))
    codes = [draft.write([op])[0] for _ in range(64)]
    assert Code.FULL in codes
    assert client.xlen(Keys().rows(S2)) == 64


def test_a_full_log_refuses_more(
    server: PrivateBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.transport.link.commands.LOG_CAP", 2)
    _, draft, job = started(server.url)
    assert [draft.write([send(S1, job, seq)])[0] for seq in (1, 2, 3)] == [
        Code.OK,
        Code.OK,
        Code.FULL,
    ]
    assert client.xlen(Keys().log(S1)) == 2


def test_rows_that_come_after_their_job_has_ended_are_not_kept(
    server: PrivateBroker, client: redis.Redis
) -> None:
    rig, _, job = started(server.url)
    stage = rig.link(S2)
    sender = rig.link(S1)
    sender.write([PutRows(S2, RunKey(job, 1), 1, np.zeros((1, 2), np.float32))])
    stage.read(1.0)
    stage.forget(RunKey(job, 1))
    sender.write([PutRows(S2, RunKey(job, 1), 2, np.zeros((1, 2), np.float32))])
    stage.read(1.0)
    assert isinstance(stage, EmulatedLink)
    assert stage._reader._rows == {}


def test_a_lease_that_says_nothing_sensible_harms_nobody(
    server: PrivateBroker, client: redis.Redis
) -> None:
    control = RedisControl(server.url, Keys())
    control.set_pipeline({"stages": "1"})
    client.set(Keys().claim("draft"), b"\xff not json")
    assert control.claims()["draft"][1] == {}
    control.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0?password=hunter2",
        "redis://:hunter2@h:1/0",
        "redis://:hun/ter2@h:1/0",
        "unix:///s?db=0&password=hunter2",
    ],
)
def test_no_form_of_a_password_is_shown(url: str) -> None:
    assert "hunter2" not in redact(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_both_kinds_of_client_say_the_systems_reason(host: str) -> None:
    url = f"redis://{host}:{free_port('127.0.0.1')}"
    for connect_to in (BrokerClient, Client):
        with pytest.raises(BrokerUnreachable) as raised:
            connect_to(url)
        assert str(raised.value) == f"cannot reach the broker at {url}: Connection refused"


def test_a_name_that_nobody_knows_is_said_without_redis_pys_own_words() -> None:
    with pytest.raises(BrokerUnreachable, match=r"no-such-host\.invalid:1: (?!Error)"):
        BrokerClient("redis://no-such-host.invalid:1")


def test_a_broker_that_cannot_be_reached_is_named_without_its_password() -> None:
    url = "unix:///s?db=0&password=hunter2"
    with pytest.raises(FlowSpecError) as raised:
        RedisControl(url, Keys())
    assert "hunter2" not in str(raised.value).replace("***", "")


@pytest.mark.parametrize("part", [None, True, [1], {"a": 1}])
def test_what_is_no_text_is_no_part_of_a_command(server: PrivateBroker, part: object) -> None:
    """As with redis-py, whose packer is given another encoder here."""
    client = connect(server.url)
    with pytest.raises(redis.DataError):
        client.execute_command("SET", "key", part)
    assert client.exists("key") == 0
    client.close()
