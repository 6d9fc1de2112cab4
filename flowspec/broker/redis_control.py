"""Jobs, leases and the pipeline's record over Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from flowspec.broker import codec
from flowspec.broker.base import (
    LEASE_MS,
    QUEUE_CAP,
    RETENTION_MS,
    Intake,
    OutputEntry,
    nodes_of,
    roles_of,
)
from flowspec.broker.connection import MAX_BLOCK_SECONDS
from flowspec.broker.keys import JOBS, Keys
from flowspec.broker.redis_client import BrokerClient
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.messages import DRAFT, SCHEDULER, Revoke, Submit
from flowspec.errors import BrokerUnreachable

_GROUP = "flowspec"
_FIELD = "f:"
_BATCH = 64


class RedisControl:
    """Control of the pipeline ``keys`` at ``url``."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._keys = keys
        self._client = BrokerClient(url)
        self._blocking: BrokerClient | None = None
        self._changes = "$"

    def _blocker(self) -> BrokerClient:
        """A connection of its own for what may block."""
        if self._blocking is None:
            self._blocking = BrokerClient(self._client.url)
        return self._blocking

    # ---- intake ----------------------------------------------------------------------------------

    def submit(self, fields: Mapping[str, str]) -> str:
        """Not retried: a lost reply must not make two jobs. Give an idempotency key and submit
        again.
        """
        flat: list[object] = [part for pair in fields.items() for part in pair]
        entry: bytes = self._client.once(("XADD", JOBS, "*", *flat))
        return entry.decode()

    def read_intake(self, block_seconds: float) -> list[Intake]:
        """Own unacknowledged entries first: after a lost reply new ones are ours, but were never
        seen.

        For the same reason a read of new entries is not repeated.
        """
        pending = self._intakes(self._blocker().run([self._group_read(1, "0")])[0])
        if pending:
            return pending
        block = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        try:
            return self._intakes(self._blocker().once(self._group_read(block, ">")))
        except BrokerUnreachable:
            # the next call begins with what may have become ours, and says so if the broker is gone
            return []

    def _group_read(self, block_ms: int, start: str) -> tuple[Any, ...]:
        count = ("COUNT", _BATCH, "BLOCK", block_ms)
        return ("XREADGROUP", "GROUP", _GROUP, self._keys.pipeline, *count, "STREAMS", JOBS, start)

    def _intakes(self, found: Any) -> list[Intake]:
        entries = found[0][1] if found else []
        return [_intake(entry, fields) for entry, fields in entries if fields]

    def join_intake(self) -> None:
        """Make the consumer group if there is none yet."""

        def create(client: redis.Redis) -> None:
            try:
                client.xgroup_create(JOBS, _GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

        self._client.call(create)

    def acknowledge(self, jobs: Sequence[str]) -> None:
        if jobs:
            self._client.run([("XACK", JOBS, _GROUP, *jobs), ("XDEL", JOBS, *jobs)])

    # ---- jobs ------------------------------------------------------------------------------------

    def admit(self, job: str, fields: Mapping[str, str], error: str = "") -> Code:
        keys = self._keys
        key = fields.get("idempotency_key", "")
        named = [keys.job(job), keys.queue, keys.out(job), keys.idempotency(key)]
        flat = [part for pair in fields.items() for part in pair] if not error else []
        arguments = [job, QUEUE_CAP, RETENTION_MS, int(bool(key)), error, *flat]
        return Code(self._client.script("admit", named, arguments))

    def queued(self) -> list[str]:
        found: Any = self._client.call(lambda client: client.lrange(self._keys.queue, 0, -1))
        return [job.decode() for job in found]

    def running(self) -> list[str]:
        found: Any = self._client.call(lambda client: client.smembers(self._keys.running))
        return sorted(job.decode() for job in found)

    def job(self, job: str) -> dict[str, str]:
        return self._hash(self._keys.job(job))

    def owners(self, job: str) -> dict[str, str]:
        found: Any = self._client.call(lambda client: client.hget(self._keys.job(job), "owners"))
        return dict(json.loads(found)) if found else {}

    def assign(self, job: str, most: int, owners: Mapping[str, str]) -> Code:
        keys = self._keys
        known = self.job(job)
        epoch = int(known.get("epoch", "0")) + 1
        fields = tuple(
            (name[len(_FIELD) :], value) for name, value in known.items() if name.startswith(_FIELD)
        )
        envelope = codec.encode(Submit(job, epoch, fields))
        named = [keys.job(job), keys.queue, keys.running, keys.log(DRAFT)]
        return Code(
            self._client.script("assign", named, [job, most, epoch, envelope, json.dumps(owners)])
        )

    def revoke(self, job: str, reason: str, error: str = "") -> Code:
        keys = self._keys
        known = self.job(job)
        epoch = int(known.get("epoch", "0"))
        logs = [keys.log(node) for node in nodes_of(self.pipeline())]
        named = [
            keys.job(job),
            keys.graph(job),
            keys.out(job),
            keys.recording(job),
            keys.running,
            keys.queue,
            *logs,
        ]
        envelope = codec.encode(Revoke(job, epoch + 1))
        return Code(
            self._client.script(
                "revoke", named, [job, epoch, reason, error, RETENTION_MS, envelope]
            )
        )

    # ---- output ----------------------------------------------------------------------------------

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        streams: dict[Any, Any] = {self._keys.out(job): cursor}
        block = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        found: Any = self._blocker().call(lambda client: client.xread(streams, _BATCH, block))
        entries = found[0][1] if found else []
        return [OutputEntry(entry.decode(), _texts(fields)) for entry, fields in entries]

    def read_recording(self, job: str) -> list[str]:
        found: Any = self._client.call(lambda client: client.xrange(self._keys.recording(job)))
        return [fields[b"l"].decode() for _, fields in found]

    def wait_for_change(self, block_seconds: float) -> None:
        streams: dict[Any, Any] = {self._keys.log(SCHEDULER): self._changes}
        block = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        found: Any = self._client.call(lambda client: client.xread(streams, _BATCH, block))
        if found:
            self._changes = found[0][1][-1][0].decode()

    # ---- leases and the record -------------------------------------------------------------------

    def claim(self, role: str, token: str, info: Mapping[str, object]) -> bool:
        answer = self._client.script(
            "claim", [self._keys.claim(role)], [token, LEASE_MS, json.dumps(info)]
        )
        return Code(answer) is Code.OK

    def release(self, role: str, token: str) -> None:
        self._client.script("release", [self._keys.claim(role)], [token])

    def claims(self) -> dict[str, tuple[str, dict[str, Any]]]:
        roles = ["scheduler", *roles_of(self.pipeline())]
        values: Any = self._client.call(
            lambda client: client.mget([self._keys.claim(role) for role in roles])
        )
        held = {}
        for role, value in zip(roles, values, strict=True):
            if value is not None:
                token, _, info = value.decode(errors="replace").partition(" ")
                held[role] = (token, _facts(info))
        return held

    def set_pipeline(self, record: Mapping[str, str]) -> None:
        flat = [part for pair in record.items() for part in pair]
        self._client.run([("DEL", self._keys.record), ("HSET", self._keys.record, *flat)])

    def pipeline(self) -> dict[str, str]:
        return self._hash(self._keys.record)

    def _hash(self, key: str) -> dict[str, str]:
        found: Any = self._client.call(lambda client: client.hgetall(key))
        return _texts(found)

    def close(self) -> None:
        self._client.close()
        if self._blocking is not None:
            self._blocking.close()


def _facts(text: str) -> dict[str, Any]:
    """What a worker says of itself; nothing, if it is not what a worker writes."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }


def _intake(entry: bytes, fields: Any) -> Intake:
    job = entry.decode()
    try:
        return Intake(job, {name.decode(): value.decode() for name, value in fields.items()})
    except UnicodeDecodeError:
        return Intake(job, error="a field of the job is not UTF-8 text")
