"""Every role under its own user: a whole pipeline runs, and a role can do no other's work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from flowspec.client import Client
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.holders import Holder
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.errors import BrokerError
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.scripts import load
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.acl import acl_file, users
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.wire.keys import JOBS, Keys
from tests.clients import RedisControlAndClient
from tests.toy import TARGET
from tests.toy_cluster import ToyCluster, ids_of

KEYS = Keys()
STAGES = 2
OTHER = Keys("p1")


@dataclass
class Door:
    """A broker with the users of a pipeline, whose passwords are their names."""

    broker: PrivateBroker

    def url(self, role: str) -> str:
        user = f"p0-{role}"
        return f"unix://{user}:{user}@{self.broker.url.rpartition('@')[2]}"

    def client(self, role: str) -> redis.Redis:
        return connect(self.url(role))


@pytest.fixture
def door() -> Iterator[Door]:
    with PrivateBroker() as broker:
        admin = connect(broker.url)
        for user in users(KEYS, STAGES):
            rules = ("on", f">{user.name}", *user.rules)
            admin.execute_command("ACL", "SETUSER", user.name, *rules)  # type: ignore[no-untyped-call]
        admin.close()
        yield Door(broker)


def test_no_rule_names_what_redis_7_0_lacks() -> None:
    """It refuses to start with a file that does."""
    rules = [rule for user in users(KEYS, STAGES, 1) for rule in user.rules]
    assert not [rule for rule in rules if rule.startswith("+client")]


def refuses(client: redis.Redis, *command: object) -> bool:
    try:
        client.execute_command(*command)  # type: ignore[no-untyped-call]
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError:
        return False
    return False


class OwnUsers(ToyCluster):
    """A cluster whose workers and scheduler each have their own user."""

    def __init__(self, door: Door) -> None:
        def link(address: Address, holder: Holder) -> LiveLink:
            return LiveLink(door.url(holder.role), KEYS, address, STAGES, holder=holder)

        first = RedisControl(door.url("scheduler"), KEYS)
        first.join_intake()  # a scheduler's lease does it before workers begin
        first.close()
        roles = iter(("scheduler", "draft", "verify-1", "verify-2", "scheduler"))
        super().__init__(lambda: RedisControlAndClient(door.url(next(roles)), KEYS), link, STAGES)


def test_a_pipeline_runs_with_every_role_under_its_own_user(door: Door) -> None:
    cluster = OwnUsers(door)
    try:
        for strategy in ("auto", "flowspec", "pipedec", "autoregressive"):
            spec = JobSpec("abcde", max_new_tokens=12, strategy=strategy, record=strategy == "auto")
            client = RedisControlAndClient(door.url("client"), KEYS)
            job = client.submit(spec.fields())
            ids, end, error = cluster.wait(job)
            assert error == ""
            assert end["finish_reason"] in ("length", "eos")
            assert ids == TARGET.decode(ids_of("abcde"), 12, Sampling())
            client.close()
        with connect(door.broker.url) as admin:
            admin.script_flush()
        assert cluster.run(JobSpec("abcde", max_new_tokens=12))[0] == ids, "loaded again"
    finally:
        cluster.stop()
    with connect(door.broker.url) as admin:
        log = admin.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
    refused = {str(entry["object"]) for entry in map(_texts, log)}
    assert refused <= {"script|load"}, "asked for after the flush"


def _texts(entry: list[object] | dict[object, object]) -> dict[str, str]:
    """A line of the server's log of refusals."""
    pairs = entry.items() if isinstance(entry, dict) else zip(entry[::2], entry[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def test_a_client_submits_and_reads_and_does_nothing_else(door: Door) -> None:
    cluster = OwnUsers(door)
    try:
        with Client(door.url("client")) as client:
            result = client.submit("abc", max_new_tokens=5).result()
            assert len(result.token_ids) == 5
    finally:
        cluster.stop()
    with door.client("client") as client_:
        for command in (
            (
                "EVALSHA",
                load()["claim"].sha,
                2,
                KEYS.claim("draft"),
                KEYS.generations,
                "t",
                9,
                "{}",
            ),
            ("SET", KEYS.claim("draft"), "t"),
            ("HSET", KEYS.record, "stages", "9"),
            ("XADD", KEYS.log(Address.parse("s1")), "*", "f", "d0"),
            ("HGETALL", OTHER.job("1-0")),
            ("XREAD", "STREAMS", KEYS.log(Address.parse("s1")), "0"),
        ):
            assert refuses(client_, *command), command


@pytest.mark.parametrize("role", ["verify-1", "verify-2", "draft"])
def test_a_worker_does_no_other_roles_work(door: Door, role: str) -> None:
    with door.client(role) as worker:
        for command in (
            ("XADD", JOBS, "*", "prompt", "p"),
            ("XREADGROUP", "GROUP", "flowspec", "w", "STREAMS", JOBS, ">"),
            ("XRANGE", JOBS, "-", "+"),
            ("FLUSHALL",),
            ("FLUSHDB",),
            ("CONFIG", "GET", "*"),
            ("CONFIG", "SET", "maxmemory", "1"),
            ("ACL", "LIST"),
            ("SHUTDOWN",),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("MONITOR",),
            ("EVAL", "return 1", "0"),
            ("SCRIPT", "LOAD", "return 1"),
            ("SCRIPT", "FLUSH"),
            ("FUNCTION", "LIST"),
            ("HGETALL", OTHER.record),
            ("HGETALL", OTHER.job("1-0")),
            ("XREAD", "STREAMS", OTHER.log(Address.parse("s1")), "0"),
            ("XADD", OTHER.log(Address.parse("s1")), "*", "f", "d0"),
            ("HSET", KEYS.record, "stages", "9"),
            ("DEL", KEYS.record),
            ("SET", KEYS.claim("scheduler"), "t"),
            ("SET", KEYS.claim("verify-9"), "t"),
            ("LRANGE", KEYS.queue, 0, -1),
        ):
            assert refuses(worker, *command), command


def test_a_stage_reads_no_prompt_no_output_and_no_other_stages_rows(door: Door) -> None:
    with door.client("verify-1") as stage:
        assert refuses(stage, "HGETALL", KEYS.request("1-0"))
        assert refuses(stage, "XREAD", "STREAMS", KEYS.submissions, "0")
        assert refuses(stage, "XADD", KEYS.submissions, "*", "f", "scheduler")
        assert refuses(stage, "XREAD", "STREAMS", KEYS.out("1-0"), "0")
        assert refuses(stage, "XADD", KEYS.out("1-0"), "*", "kind", "end")
        assert refuses(stage, "XREAD", "STREAMS", KEYS.rows(Address.parse("s2")), "0")
        assert not refuses(stage, "XADD", KEYS.rows(Address.parse("s2")), "*", "j", "1-0")
        assert not refuses(stage, "XREAD", "STREAMS", KEYS.rows(Address.parse("s1")), "0")


def test_who_may_not_load_scripts_waits_for_them_and_says_so(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.transport.connections.redis_client.SCRIPTS_SECONDS", 0.1)
    worker = BrokerClient(door.url("verify-1"))
    named = [KEYS.claim("verify-1"), KEYS.generations]
    with pytest.raises(BrokerError, match="start the pipeline's scheduler, of the same"):
        worker.script("claim", named, ["t", 1000, "{}", "verify-1"])
    scheduler = RedisControl(door.url("scheduler"), KEYS)
    scheduler.join_intake()
    assert worker.script("claim", named, ["t", 1000, "{}", "verify-1"]) == 0
    worker.close()
    scheduler.close()


def test_a_spare_is_listed_as_long_as_it_says_that_it_waits(door: Door) -> None:
    spare = {"roles": ["verify-1", "verify-2"], "host": "box", "pid": 7}
    with connect(door.broker.url) as admin, Client(door.url("client")) as client:
        for member in ("no JSON", "[]", '{"roles": 1}', '{"roles": [2], "host": "h", "pid": 1}'):
            admin.zadd(KEYS.spares, {member: 1e15})
        admin.zadd(KEYS.spares, {json.dumps(spare | {"pid": 6}): 1})
        assert client.spares() == []
        stage = RedisControl(door.url("verify-1"), KEYS)
        stage.note_spare(spare)
        stage.note_spare(spare)
        assert client.spares() == [spare]
        assert admin.zcard(KEYS.spares) == 5, "who waits no longer is forgotten"
        stage.close()


def test_a_server_reads_the_file(door: Door) -> None:
    found = users(KEYS, STAGES, middles=1)
    text = acl_file(found, [f"word-{number}" for number in range(len(found))])
    assert "word-" not in text, "hashes alone"
    assert door.broker.directory is not None
    (door.broker.directory / "users.acl").write_text(text)
    with PrivateBroker(users=[line.removeprefix("user ") for line in text.splitlines()[1:]]) as own:
        place = own.url.rpartition("@")[2]
        for number, user in enumerate(found):
            with connect(f"unix://{user.name}:word-{number}@{place}") as client:
                assert client.ping()
