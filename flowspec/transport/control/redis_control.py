"""Jobs, leases and the pipeline's record over Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis

from flowspec.core.protocol.addresses import DRAFT, SCHEDULER
from flowspec.core.protocol.causes import LOST
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder, holders_text, read_holders
from flowspec.core.protocol.lease import TERMS
from flowspec.core.protocol.messages import Earlier, Revoke, Submit
from flowspec.core.run.key import RunKey, may_be_id
from flowspec.errors import BrokerError, BrokerUnreachable
from flowspec.observe import logger
from flowspec.transport.base import (
    QUEUE_CAP,
    RETENTION_MS,
    SPARE_MS,
    Intake,
    digest_of,
    earlier_of,
    role_of,
    roles_of,
    workers_of,
)
from flowspec.transport.connections.answers import WRONG_TYPE, code_of
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.control.replies import (
    Claims,
    claims_of,
    generation_of,
    job_record,
    output_entries,
    pipeline_record,
)
from flowspec.transport.wire import codec
from flowspec.transport.wire.keys import JOBS, Keys

_GROUP = "flowspec"
_FIELD = "f:"
_BATCH = 64
#: Answers to readers of an intake that was deleted, with or without its group, or replaced.
_INTAKE_GONE = ("NOGROUP", WRONG_TYPE)
#: Most entries of an intake that is made anew, and how far an id may be ahead of the clock, ms.
_INTAKE_MOST = 100_000
_FUTURE_MS = 86_400_000
#: How long what was written only to see whether that is possible is kept, ms.
_WRITTEN_MS = 60_000

#: Fields of a job's record, without its prompt and its options.
_PLACED = (b"state", b"epoch", b"again", b"holders")
#: Tries to admit a job while its idempotency key changes hands; only schedulers admit jobs.
_ADMIT_TRIES = 3
#: Later than every run of a job whose epoch is not known any more.
LAST_EPOCH = 1 << 31


class RedisControl:
    """Control of the pipeline ``keys`` at ``url``."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._keys = keys
        self._client = BrokerClient(url)
        self._blocking: BrokerClient | None = None
        self._changes = "0-0"  # cursor in the scheduler's log

    def _blocker(self) -> BrokerClient:
        """A separate connection for blocking reads."""
        if self._blocking is None:
            self._blocking = BrokerClient(self._client.url)
        return self._blocking

    # ---- intake ----------------------------------------------------------------------------------

    def read_intake(self, block_seconds: float) -> list[Intake]:
        """Read this consumer's unacknowledged entries, or new ones if there are none.

        Entries whose reply was lost are among the unacknowledged ones, so a read of new entries is
        not retried. A deleted intake, or one with no id left, is made anew.
        """
        block = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        try:
            pending = self._intakes(self._blocker().run([self._group_read(1, "0")])[0])
            found = pending or self._read_new(block)
        except BrokerError as error:
            if error.code not in _INTAKE_GONE:
                raise
            found = []
        if not found:
            self._renew_intake()
        return found

    def _read_new(self, block_ms: int) -> list[Intake]:
        try:
            return self._intakes(self._blocker().once(self._group_read(block_ms, ">")))
        except BrokerUnreachable:
            # The next call reads entries that this one may have claimed, or raises if the broker
            # stays unreachable.
            return []

    def _renew_intake(self) -> None:
        """Let jobs be submitted again if the intake was deleted, replaced or has no id left."""
        self.join_intake()
        code = Code(self._client.script("renew_intake", [JOBS], [_INTAKE_MOST, _GROUP, _FUTURE_MS]))
        if code is Code.OK:
            logger(role="scheduler").warning("intake made anew", intake=JOBS)

    def _group_read(self, block_ms: int, start: str) -> tuple[Any, ...]:
        count = ("COUNT", _BATCH, "BLOCK", block_ms)
        return ("XREADGROUP", "GROUP", _GROUP, self._keys.pipeline, *count, "STREAMS", JOBS, start)

    def _intakes(self, found: Any) -> list[Intake]:
        entries = found[0][1] if found else []
        return [_intake(entry, fields) for entry, fields in entries if fields]

    def join_intake(self) -> None:
        """Create the consumer group unless it exists, and load the scripts.

        Workers may not be allowed to load them.
        """
        self._client.call(lambda client: self._client.load_scripts())

        def create(client: redis.Redis) -> None:
            try:
                client.xgroup_create(JOBS, _GROUP, id="0", mkstream=True)
            except redis.ResponseError as error:
                # A key of another type gives way at the first read.
                if code_of(error) not in ("BUSYGROUP", WRONG_TYPE):
                    raise

        self._client.call(create)

    def acknowledge(self, jobs: Sequence[str]) -> None:
        if jobs:
            self._client.run([("XACK", JOBS, _GROUP, *jobs), ("XDEL", JOBS, *jobs)])

    # ---- jobs ------------------------------------------------------------------------------------

    def admit(
        self, job: str, fields: Mapping[str, str], error: str = "", *, most: int | None = None
    ) -> Code:
        for _ in range(_ADMIT_TRIES):
            code = self._admit(job, fields, error, QUEUE_CAP if most is None else most)
            if code is not Code.STALE:
                return code
        raise BrokerError(f"the idempotency key of job {job} changes hands all the time")

    def _admit(self, job: str, fields: Mapping[str, str], error: str, most: int) -> Code:
        """Admit ``job``; STALE: its idempotency key has just got another owner."""
        keys = self._keys
        key = fields.get("idempotency_key", "")
        held = self._key_holder(key)
        named = [
            keys.job(job),
            keys.queue,
            keys.out(job),
            keys.idempotency(key),
            keys.log(SCHEDULER),
            keys.job(held.partition(" ")[0]),
            keys.request(job),
        ]
        flat = [part for pair in fields.items() for part in pair] if not error else []
        digest = digest_of(fields) if key else ""
        arguments = [job, most, RETENTION_MS, digest, error, held, *flat]
        return Code(self._client.script("admit", named, arguments))

    def _key_holder(self, key: str) -> str:
        """The job that has the idempotency key ``key``, and the digest of its fields; or ''."""
        stored = self._keys.idempotency(key)
        found = self._typed(lambda client: client.get(stored)) if key else None
        return found.decode() if found else ""

    def queued(self) -> list[str]:
        key = self._keys.queue
        (found,) = self._client.run([("LRANGE", key, 0, -1)])
        return self._jobs(found, lambda member: ("LREM", key, 0, member))

    def running(self) -> list[str]:
        key = self._keys.running
        (found,) = self._client.run([("SMEMBERS", key)])
        return sorted(self._jobs(found, lambda member: ("SREM", key, member)))

    def _jobs(
        self, members: Iterable[bytes], removing: Callable[[bytes], tuple[Any, ...]]
    ) -> list[str]:
        """The jobs among ``members``; what names no job is removed."""
        jobs, wrong = [], []
        for member in members:
            if _may_name_job(member):
                jobs.append(member.decode())
            else:
                wrong.append(removing(member))
        if wrong:
            self._client.run(wrong)
            logger(role="scheduler").warning("members removed that name no job", count=len(wrong))
        return jobs

    def job(self, job: str) -> dict[str, str]:
        return job_record(*self._stored(job))

    def _stored(self, job: str) -> tuple[Any, Any]:
        """The job's hash and its request."""
        return self._hash(self._keys.job(job)), self._hash(self._keys.request(job))

    def _sound(self, job: str) -> dict[str, str]:
        """The job's record; a damaged one is deleted, so that scripts find none either."""
        stored, request = self._stored(job)
        known = job_record(stored, request)
        if known and not request and known["state"] != "done":
            known = {}
        if stored and not known:
            self._client.run([("DEL", self._keys.job(job))])
        return known

    def holders(self, job: str) -> dict[str, int]:
        return read_holders(self._placed(job).get("holders", ""))

    def _placed(self, job: str) -> dict[str, str]:
        """What is needed of the job's record at every turn, without its prompt."""
        key = self._keys.job(job)
        values = self._typed(lambda client: client.hmget(key, _PLACED)) or [None] * len(_PLACED)
        pairs = zip(_PLACED, values, strict=True)
        return job_record({name: value for name, value in pairs if value is not None})

    def _field(self, job: str, name: str) -> str:
        """A field of the job's hash; empty: there is none."""
        key = self._keys.job(job)
        found = self._typed(lambda client: client.hget(key, name))
        return found.decode(errors="replace") if found else ""

    def assign(
        self, job: str, most: int, holders: Mapping[str, int], by: int | None = None
    ) -> Code:
        keys = self._keys
        known = self._sound(job)
        run = RunKey(job, int(known.get("epoch", "0")) + 1)
        fields = tuple(
            (name.removeprefix(_FIELD), value)
            for name, value in known.items()
            if name.startswith(_FIELD)
        )
        generations = tuple(holders.values())
        earlier = self._earlier(job, known) if run.epoch > 1 else None
        waited = self._queued_seconds(job)
        envelope = codec.encode(Submit(run, fields, waited, generations, earlier))
        named = [keys.job(job), keys.queue, keys.running, keys.submissions, keys.generations]
        arguments = [job, most, run.epoch, envelope, holders_text(holders), _scheduler(by)]
        return Code(self._client.script("assign", named, arguments))

    def _earlier(self, job: str, known: Mapping[str, str]) -> Earlier | None:
        """What the job's runs have left. It waits, so that none of them writes meanwhile."""
        entries = self._client.run([("XRANGE", self._keys.out(job), "-", "+")])[0]
        return earlier_of(job, known, output_entries(entries))

    def _queued_seconds(self, job: str) -> float:
        """Seconds since ``job`` was submitted; its id holds that time."""
        submitted_ms = int(job.partition("-")[0])
        return max(0.0, self._now() - submitted_ms / 1e3)

    def _now(self) -> float:
        """Seconds on the server's clock."""
        seconds, microseconds = self._client.call(lambda client: client.time())
        return float(seconds + microseconds / 1e6)

    def revoke(
        self,
        job: str,
        reason: str,
        error: str = "",
        cause: str = LOST,
        *,
        by: int | None = None,
        lost: Holder | None = None,
        again: int = 0,
    ) -> Code:
        keys = self._keys
        known = self._sound(job)
        run = RunKey(job, int(known.get("epoch", "0")))
        workers = workers_of(self.pipeline())
        named = [
            keys.job(job),
            keys.run(run),
            keys.out(job),
            keys.recording(run),
            keys.running,
            keys.queue,
            keys.log(SCHEDULER),
            keys.generations,
            keys.claim(lost.role if lost is not None else role_of(DRAFT)),
            keys.request(job),
            *map(keys.log, workers),
        ]
        later = run.epoch + 1 if known else LAST_EPOCH
        envelope = codec.encode(Revoke(RunKey(job, later)))
        whose = [_scheduler(by), str(lost) if lost is not None else "", again]
        arguments = [job, run.epoch, reason, error, RETENTION_MS, envelope, cause, *whose]
        return Code(self._client.script("revoke", named, arguments))

    def unfollowed(self) -> list[str]:
        followed = self._keys.followed
        now_ms = int(self._now() * 1000)
        (found,) = self._client.run([("ZRANGEBYSCORE", followed, "-inf", now_ms)])
        named = [member.decode(errors="replace") for member in found]
        states = {job: self._field(job, "state") for job in named}
        if ended := [job for job, state in states.items() if state == "done"]:
            self._client.run([("ZREM", followed, *ended)])
        if states:  # those that were lost before they were taken in
            self._client.run([("ZREMRANGEBYSCORE", followed, "-inf", now_ms - RETENTION_MS)])
        return [job for job, state in states.items() if state not in ("", "done")]

    def wait_for_change(self, block_seconds: float) -> None:
        streams: dict[Any, Any] = {self._keys.log(SCHEDULER): self._changes}
        block = max(1, int(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        found: Any = self._client.call(lambda client: client.xread(streams, _BATCH, block))
        if found:
            self._changes = found[0][1][-1][0].decode()

    def place(self, job: str) -> Code:
        named = [self._keys.job(job), self._keys.queue, self._keys.running]
        return Code(self._client.script("place", named, [job]))

    def drop_mistyped(self) -> bool:
        keys = self._keys
        record = keys.record
        dropped = self._drop({record: "hash", keys.queue: "list", keys.running: "set"})
        known = self.pipeline()
        streams = [keys.log(SCHEDULER), keys.submissions]
        for worker in workers_of(known):
            streams += [keys.log(worker), keys.rows(worker)]
        claims = map(keys.claim, ["scheduler", *roles_of(known)])
        types = {keys.generations: "hash", **dict.fromkeys(claims, "string")}
        types |= dict.fromkeys((keys.followed, keys.spares), "zset")
        for job in self.running():
            types |= {keys.job(job): "hash", keys.request(job): "hash"}
            if epoch := self._placed(job).get("epoch"):
                run = RunKey(job, int(epoch))
                types[keys.run(run)] = "hash"
                streams += [keys.out(job), keys.recording(run)]
        return self._drop(types | dict.fromkeys(streams, "stream")) or dropped

    def _drop(self, types: Mapping[str, str]) -> bool:
        """Delete the keys of ``types`` that hold another type; whether there were any."""
        code = Code(self._client.script("drop_mistyped", list(types), list(types.values())))
        if code is Code.OK:
            logger(role="scheduler").warning("keys of a wrong type deleted")
        return code is Code.OK

    # ---- leases and the record -------------------------------------------------------------------

    def claim(
        self,
        role: str,
        token: str,
        info: Mapping[str, object],
        lifetime_ms: int = TERMS.shortest_ms,
    ) -> int:
        keys = self._keys
        arguments = [token, lifetime_ms, json.dumps(info), role]
        answer, found = self._client.run(
            [
                self._client.evalsha("claim", [keys.claim(role), keys.generations], arguments),
                ("HMGET", keys.generations, role, f"by:{role}"),
            ]
        )
        if Code(answer) is not Code.OK:
            return 0
        number, latest = (part.decode() for part in found)
        return generation_of(role, token, {role: number, f"by:{role}": latest})

    def release(self, role: str, token: str, *, leaves: bool = False) -> None:
        named = [self._keys.claim(role), self._keys.generations]
        self._client.script("release", named, [token, role, int(leaves)])

    def note_spare(self, spare: Mapping[str, object]) -> None:
        """Say that ``spare`` waits; it counts as long as that is said again in time."""
        now_ms = int(self._now() * 1000)
        self._client.run(
            [
                ("ZREMRANGEBYSCORE", self._keys.spares, "-inf", now_ms),
                ("ZADD", self._keys.spares, now_ms + SPARE_MS, json.dumps(spare)),
            ]
        )

    def claims(self) -> Claims:
        roles = ["scheduler", *roles_of(self.pipeline())]
        values, generations = self._client.run(
            [("MGET", *map(self._keys.claim, roles)), ("HGETALL", self._keys.generations)]
        )
        return claims_of(roles, values, generations)

    def set_pipeline(self, record: Mapping[str, str], by: int | None = None) -> Code:
        flat = [part for pair in record.items() for part in pair]
        named = [self._keys.record, self._keys.generations]
        return Code(self._client.script("set_pipeline", named, [_scheduler(by), *flat]))

    def drop_pipeline(self) -> None:
        """Delete the record, unless a scheduler holds its lease: workers wait for the next one."""
        if "scheduler" not in self.claims():
            self._client.run([("DEL", self._keys.record)])

    def pipeline(self) -> dict[str, str]:
        return pipeline_record(self._hash(self._keys.record))

    def check_writes(self) -> None:
        self._blocker().run([("SET", self._keys.written, 1, "PX", _WRITTEN_MS)])

    def eviction(self) -> str:
        facts: Any = self._client.call(lambda client: client.info("memory"))
        policy = str(facts.get("maxmemory_policy", "noeviction"))
        return policy if int(facts.get("maxmemory", 0)) and policy != "noeviction" else ""

    def _hash(self, key: str) -> Any:
        return self._typed(lambda client: client.hgetall(key)) or {}

    def _typed(self, command: Callable[[redis.Redis], Any]) -> Any:
        """The answer to ``command``; None if its key is of another type: its own was deleted."""
        try:
            return self._client.call(command)
        except BrokerError as error:
            if error.code != WRONG_TYPE:
                raise
            return None

    def close(self) -> None:
        self._client.close()
        if self._blocking is not None:
            self._blocking.close()


def _scheduler(generation: int | None) -> str:
    """The scheduler of ``generation`` as a holder; None: no scheduler."""
    return "" if generation is None else str(Holder(role_of(SCHEDULER), generation))


def _may_name_job(member: bytes) -> bool:
    try:
        return may_be_id(member.decode())
    except UnicodeDecodeError:
        return False


def _intake(entry: bytes, fields: Any) -> Intake:
    job = entry.decode()
    try:
        return Intake(job, {name.decode(): value.decode() for name, value in fields.items()})
    except UnicodeDecodeError:
        return Intake(job, error="a field of the job is not UTF-8 text")
