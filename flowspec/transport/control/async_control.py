"""What clients do over Redis: they submit jobs, and look at them and at the pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.core.run.key import RunKey
from flowspec.transport.base import FOLLOWED_MS, roles_of
from flowspec.transport.connections.async_client import AsyncBrokerClient
from flowspec.transport.control.output_reader import OutputReader
from flowspec.transport.control.replies import (
    Claims,
    claims_of,
    job_record,
    lost_of,
    pipeline_record,
    recording_lines,
    spares_of,
)
from flowspec.transport.wire.keys import JOBS, Keys

#: The id of a stream entry, which is a job's id.
_ENTRY_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}", re.ASCII)


class AsyncRedisControl:
    """Jobs and the pipeline's record at ``url``, for one event loop."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._keys = keys
        self._client = AsyncBrokerClient(url)
        self.outputs = OutputReader(self._client, keys)

    async def open(self) -> None:
        """Connect; BrokerUnreachable if that fails."""
        await self._client.open()

    async def submit(self, fields: Mapping[str, str]) -> str:
        """Append a job to the intake; its id.

        Not retried: a lost reply must not make two jobs. With an idempotency key a caller may
        submit again.
        """
        flat = [part for pair in fields.items() for part in pair]
        await self._client.run(("PING",))  # a broker that is away is waited for
        entry: bytes = await self._client.once(("XADD", JOBS, "*", *flat))
        return entry.decode()

    async def follow(self, jobs: Sequence[str], lifetime_ms: int = FOLLOWED_MS) -> None:
        """Say that somebody waits for ``jobs``, which end unless that is said again in time."""
        until = await self._now_ms() + lifetime_ms
        members = (part for job in jobs for part in (until, job))
        await self._client.run(("ZADD", self._keys.followed, "GT", *members))

    async def _now_ms(self) -> int:
        """The broker's clock."""
        ((seconds, microseconds),) = await self._client.run(("TIME",))
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def submitted(self, job: str) -> bool:
        """Whether the intake holds ``job``: submitted, and not yet acknowledged."""
        if not _ENTRY_ID.fullmatch(job):
            return False
        return bool((await self._client.run(("XRANGE", JOBS, job, job)))[0])

    async def job(self, job: str) -> dict[str, str]:
        """As ``RedisControl.job``."""
        named = (self._keys.job(job), self._keys.request(job))
        return job_record(*await self._client.run(*(("HGETALL", key) for key in named)))

    async def pipeline(self) -> dict[str, str]:
        """As ``RedisControl.pipeline``."""
        return pipeline_record(await self._hash(self._keys.record))

    async def claims(self) -> Claims:
        """As ``RedisControl.claims``."""
        return claims_of(*await self._leases())

    async def lost(self) -> list[str]:
        """Roles without a lease, of which the latest holder did not say that it leaves."""
        return lost_of(*await self._leases())

    async def spares(self) -> list[dict[str, Any]]:
        """The spares that wait: ``roles``, ``host`` and ``pid`` of each."""
        now_ms = await self._now_ms()
        (found,) = await self._client.run(("ZRANGEBYSCORE", self._keys.spares, now_ms, "+inf"))
        return spares_of(found)

    async def _leases(self) -> tuple[list[str], Any, Any]:
        """All roles, their leases as stored, and the roles' generations."""
        roles = ["scheduler", *roles_of(await self.pipeline())]
        values, generations = await self._client.run(
            ("MGET", *map(self._keys.claim, roles)), ("HGETALL", self._keys.generations)
        )
        return roles, values, generations

    async def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting jobs."""
        running, waiting = await self._client.run(
            ("SCARD", self._keys.running), ("LLEN", self._keys.queue)
        )
        return int(running), int(waiting)

    async def expire(self, job: str, seconds: float) -> None:
        """Keep what is stored of an ended job no longer than ``seconds``."""
        kept = int(seconds * 1000)
        named = (self._keys.job(job), self._keys.request(job), self._keys.out(job))
        await self._client.run(*(("PEXPIRE", key, kept) for key in named))

    async def read_recording(self, job: str) -> list[str]:
        """The recording of the job's newest recorded run, as lines."""
        epoch = int(job_record(await self._hash(self._keys.job(job))).get("epoch", "0"))
        for run in (RunKey(job, earlier) for earlier in range(epoch, 0, -1)):
            (found,) = await self._client.run(("XRANGE", self._keys.recording(run), "-", "+"))
            if found:
                return recording_lines(found)
        return []

    async def _hash(self, key: str) -> Any:
        (found,) = await self._client.run(("HGETALL", key))
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self.outputs.close()
        await self._client.close()
