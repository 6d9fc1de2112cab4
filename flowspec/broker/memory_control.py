"""Control over the in-memory broker; see ``base.Control``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.broker.base import (
    FULL,
    LEASE_MS,
    LOST,
    QUEUE_CAP,
    REFUSED,
    Intake,
    OutputEntry,
    workers_of,
)
from flowspec.broker.memory import MemoryBroker, MemoryJob
from flowspec.core.protocol.codes import Code
from flowspec.core.run.key import RunKey


class MemoryControl:
    """Jobs, leases and the pipeline's record, in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._wakes_seen = broker.wakes

    def submit(self, fields: Mapping[str, str]) -> str:
        with self._broker.changed:
            job = self._broker.submit(fields)
            self._broker.changed.notify_all()
        return job

    def submitted(self, job: str) -> bool:
        broker = self._broker
        with broker.changed:
            return any(intake.job == job for intake in broker.intake + broker.unacknowledged)

    def read_intake(self, block_seconds: float) -> list[Intake]:
        broker = self._broker
        with broker.changed:
            if not broker.unacknowledged:
                broker.changed.wait_for(lambda: bool(broker.intake), timeout=block_seconds)
                broker.unacknowledged = broker.intake
                broker.intake = []
            return list(broker.unacknowledged)

    def join_intake(self) -> None:
        """Nothing to join: there is only one reader."""

    def acknowledge(self, jobs: Sequence[str]) -> None:
        broker = self._broker
        with broker.changed:
            left = [intake for intake in broker.unacknowledged if intake.job not in jobs]
            broker.unacknowledged = left

    def admit(self, job: str, fields: Mapping[str, str], error: str = "") -> Code:
        broker = self._broker
        with broker.changed:
            admission = broker.ledger.admit(job, fields, QUEUE_CAP, error)
            if job in broker.jobs:
                return admission.code
            known = broker.jobs[job] = MemoryJob()
            if admission.refused:
                cause = FULL if admission.code is Code.FULL else REFUSED
                broker.note_end(job, "error", admission.refused, None, cause)
                if admission.duplicate_of:
                    known.output[0]["duplicate_of"] = admission.duplicate_of
            else:
                broker.wakes += 1
            broker.changed.notify_all()
        return admission.code

    def queued(self) -> list[str]:
        with self._broker.changed:
            return list(self._broker.ledger.queue)

    def running(self) -> list[str]:
        with self._broker.changed:
            return sorted(self._broker.ledger.running)

    def job(self, job: str) -> dict[str, str]:
        with self._broker.changed:
            entry = self._broker.ledger.jobs.get(job)
            if entry is None:
                return {}
            fields = {f"f:{name}": value for name, value in entry.fields}
            facts = {"state": entry.state.value, "epoch": str(entry.epoch)}
            if entry.offset is not None:
                facts |= {"offset": str(entry.offset), "emitted": str(entry.emitted)}
            return {**facts, **fields, **self._broker.jobs[job].facts}

    def owners(self, job: str) -> dict[str, str]:
        with self._broker.changed:
            known = self._broker.jobs.get(job)
            return dict(json.loads(known.facts.get("owners", "{}"))) if known else {}

    def assign(self, job: str, most: int, owners: Mapping[str, str]) -> Code:
        broker = self._broker
        with broker.changed:
            change = broker.ledger.assign(job, most, broker.queued_seconds(job))
            if change.code is Code.OK:
                broker.jobs[job].facts["owners"] = json.dumps(owners)
            broker.carry_out(change)
            broker.changed.notify_all()
        return change.code

    def revoke(self, job: str, reason: str, error: str = "", cause: str = LOST) -> Code:
        broker = self._broker
        with broker.changed:
            change = broker.ledger.revoke(job, workers_of(broker.record))
            if change.code is Code.OK:
                broker.note_end(job, reason, error, None, cause)
                broker.wakes += 1
            broker.carry_out(change)
            broker.changed.notify_all()
        return change.code

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        return self.read_outputs({job: cursor}, block_seconds).get(job, [])

    def read_outputs(
        self, cursors: Mapping[str, str], block_seconds: float
    ) -> dict[str, list[OutputEntry]]:
        with self._broker.changed:
            self._broker.changed.wait_for(
                lambda: any(self._output(*known) for known in cursors.items()),
                timeout=block_seconds,
            )
            found = {job: self._output(job, cursor) for job, cursor in cursors.items()}
        return {job: entries for job, entries in found.items() if entries}

    def _output(self, job: str, cursor: str) -> list[OutputEntry]:
        start = int(cursor.partition("-")[0])
        known = self._broker.jobs.get(job)
        entries = known.output[start:] if known is not None else []
        return [OutputEntry(f"{start + at + 1}-0", entry) for at, entry in enumerate(entries)]

    def read_recording(self, job: str) -> list[str]:
        with self._broker.changed:
            entry = self._broker.ledger.jobs.get(job)
            recordings = self._broker.recordings
            for epoch in range(entry.epoch if entry else 0, 0, -1):
                if RunKey(job, epoch) in recordings:
                    return list(recordings[RunKey(job, epoch)])
        return []

    def wait_for_change(self, block_seconds: float) -> None:
        broker = self._broker
        with broker.changed:
            broker.changed.wait_for(lambda: broker.wakes > self._wakes_seen, timeout=block_seconds)
            self._wakes_seen = broker.wakes

    def claim(
        self, role: str, token: str, info: Mapping[str, object], lifetime_ms: int = LEASE_MS
    ) -> bool:
        broker = self._broker
        now = time.monotonic()
        with broker.changed:
            held = broker.leases.get(role)
            if held is not None and held[0] != token and held[2] > now:
                return False
            broker.leases[role] = (token, json.dumps(info), now + lifetime_ms / 1000)
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
        """Nothing to close."""
