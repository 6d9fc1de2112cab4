"""Control over the in-memory broker; see ``base.Control``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.broker.base import LEASE_MS, QUEUE_CAP, Intake, OutputEntry, nodes_of
from flowspec.broker.memory import MemoryBroker, MemoryJob
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.messages import DRAFT, SCHEDULER, Revoke, Submit


class MemoryControl:
    """Jobs, leases and the pipeline's record, in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._unacknowledged: list[Intake] = []

    def submit(self, fields: Mapping[str, str]) -> str:
        with self._broker.changed:
            self._broker.submitted += 1
            job = f"{self._broker.submitted}-0"
            self._broker.intake.append(Intake(job, dict(fields)))
            self._broker.changed.notify_all()
        return job

    def read_intake(self, block_seconds: float) -> list[Intake]:
        if self._unacknowledged:
            return list(self._unacknowledged)
        with self._broker.changed:
            self._broker.changed.wait_for(lambda: bool(self._broker.intake), timeout=block_seconds)
            self._unacknowledged = self._broker.intake
            self._broker.intake = []
        return list(self._unacknowledged)

    def join_intake(self) -> None:
        """There is one group, and it is there."""

    def acknowledge(self, jobs: Sequence[str]) -> None:
        self._unacknowledged = [intake for intake in self._unacknowledged if intake.job not in jobs]

    def admit(self, job: str, fields: Mapping[str, str], error: str = "") -> Code:
        broker = self._broker
        key = fields.get("idempotency_key", "")
        with broker.changed:
            if job in broker.jobs:
                return Code.DUP
            answer = Code.OK
            duplicate = ""
            if not error and key in broker.idempotency:
                duplicate = broker.idempotency[key]
                answer = Code.DUP
                error = f"the idempotency key belongs to job {duplicate}"
            elif not error and len(broker.queue) >= QUEUE_CAP:
                answer = Code.FULL
                error = f"the queue is full: {QUEUE_CAP} jobs wait already; submit again later"
            broker.jobs[job] = MemoryJob(dict(fields) if not error else {})
            if error:
                broker.end(job, "error", error, None)
                if duplicate:
                    broker.jobs[job].output[0]["duplicate_of"] = duplicate
            else:
                broker.queue.append(job)
                if key:
                    broker.idempotency[key] = job
            broker.changed.notify_all()
        return answer

    def queued(self) -> list[str]:
        with self._broker.changed:
            return list(self._broker.queue)

    def running(self) -> list[str]:
        with self._broker.changed:
            return sorted(self._broker.running)

    def job(self, job: str) -> dict[str, str]:
        with self._broker.changed:
            known = self._broker.jobs.get(job)
            if known is None:
                return {}
            fields = {f"f:{name}": value for name, value in known.fields.items()}
            return {"state": known.state, "epoch": str(known.epoch), **fields, **known.facts}

    def owners(self, job: str) -> dict[str, str]:
        with self._broker.changed:
            return dict(json.loads(self._broker.jobs[job].facts.get("owners", "{}")))

    def assign(self, job: str, most: int, owners: Mapping[str, str]) -> Code:
        broker = self._broker
        with broker.changed:
            if broker.queue[:1] != [job]:
                return Code.GAP
            if len(broker.running) >= most:
                return Code.FULL
            known = broker.jobs[job]
            broker.queue.pop(0)
            broker.running.add(job)
            known.state = "running"
            known.epoch = known.epoch + 1
            known.facts["owners"] = json.dumps(owners)
            broker.append(
                DRAFT, SCHEDULER, 1, Submit(job, known.epoch, tuple(known.fields.items()))
            )
            broker.changed.notify_all()
        return Code.OK

    def revoke(self, job: str, reason: str, error: str = "") -> Code:
        broker = self._broker
        with broker.changed:
            known = broker.jobs.get(job)
            if known is None or known.state == "done":
                return Code.DUP
            known.epoch += 1
            if known.state == "running":
                for node in nodes_of(broker.record):
                    broker.append(node, SCHEDULER, 0, Revoke(job, known.epoch))
            else:
                broker.queue.remove(job)
            broker.end(job, reason, error, None)
            broker.changed.notify_all()
        return Code.OK

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        start = int(cursor.partition("-")[0])

        def entries() -> list[dict[str, str]]:
            known = self._broker.jobs.get(job)
            return known.output[start:] if known is not None else []

        with self._broker.changed:
            self._broker.changed.wait_for(lambda: bool(entries()), timeout=block_seconds)
            return [OutputEntry(f"{start + at + 1}-0", entry) for at, entry in enumerate(entries())]

    def read_recording(self, job: str) -> list[str]:
        with self._broker.changed:
            return list(self._broker.jobs[job].recording)

    def wait_for_change(self, block_seconds: float) -> None:
        with self._broker.changed:
            self._broker.changed.wait(timeout=block_seconds)

    def claim(self, role: str, token: str, info: Mapping[str, object]) -> bool:
        broker = self._broker
        now = time.monotonic()
        with broker.changed:
            held = broker.leases.get(role)
            if held is not None and held[0] != token and held[2] > now:
                return False
            broker.leases[role] = (token, json.dumps(info), now + LEASE_MS / 1000)
        return True

    def release(self, role: str, token: str) -> None:
        with self._broker.changed:
            if self._broker.leases.get(role, ("", "", 0.0))[0] == token:
                del self._broker.leases[role]

    def claims(self) -> dict[str, tuple[str, dict[str, Any]]]:
        now = time.monotonic()
        with self._broker.changed:
            return {
                role: (token, json.loads(info))
                for role, (token, info, until) in self._broker.leases.items()
                if until > now
            }

    def set_pipeline(self, record: Mapping[str, str]) -> None:
        with self._broker.changed:
            self._broker.record = dict(record)

    def pipeline(self) -> dict[str, str]:
        with self._broker.changed:
            return dict(self._broker.record)

    def close(self) -> None:
        """Nothing to give back."""
