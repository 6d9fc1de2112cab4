"""Control over the in-memory broker; see ``base.Control``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from flowspec.core.protocol.addresses import SCHEDULER
from flowspec.core.protocol.causes import FULL, LOST, REFUSED
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder, holders_text
from flowspec.core.protocol.lease import TERMS
from flowspec.core.protocol.ledger import JobState
from flowspec.core.run.key import RunKey
from flowspec.transport.base import (
    QUEUE_CAP,
    Claim,
    Intake,
    OutputEntry,
    earlier_of,
    role_of,
    workers_of,
)
from tests.transport.memory import MemoryBroker, MemoryJob


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

    def follow(self, jobs: Sequence[str], lifetime_ms: int) -> None:
        with self._broker.changed:
            until = time.monotonic() + lifetime_ms / 1000
            self._broker.followed |= dict.fromkeys(jobs, until)

    def unfollowed(self) -> list[str]:
        broker = self._broker
        with broker.changed:
            known = broker.ledger.jobs
            for job in broker.followed.keys() & known.keys():
                if known[job].state is JobState.DONE:
                    del broker.followed[job]
            now = time.monotonic()
            return [job for job, until in broker.followed.items() if until < now and job in known]

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

    def admit(
        self, job: str, fields: Mapping[str, str], error: str = "", *, most: int | None = None
    ) -> Code:
        broker = self._broker
        with broker.changed:
            admission = broker.ledger.admit(job, fields, QUEUE_CAP if most is None else most, error)
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
            if entry.again:
                facts["again"] = str(entry.again)
            return {**facts, **fields, **self._broker.jobs[job].facts}

    def holders(self, job: str) -> dict[str, int]:
        with self._broker.changed:
            entry = self._broker.ledger.jobs.get(job)
            return dict(entry.holders) if entry is not None else {}

    def assign(
        self, job: str, most: int, holders: Mapping[str, int], by: int | None = None
    ) -> Code:
        broker = self._broker
        with broker.changed:
            waited = broker.queued_seconds(job)
            known = broker.jobs.get(job)
            earlier = None
            if known is not None:
                earlier = earlier_of(job, known.facts, self._output(job, "0"))
            change = broker.ledger.assign(
                job, most, waited, holders=holders, earlier=earlier, by=_scheduler(by)
            )
            if change.code is Code.OK:
                broker.jobs[job].facts["holders"] = holders_text(holders)
            broker.carry_out(change)
            broker.changed.notify_all()
        return change.code

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
        broker = self._broker
        with broker.changed:
            leased = lost is not None and lost.role in self._leases()
            change = broker.ledger.revoke(
                job,
                workers_of(broker.record),
                by=_scheduler(by),
                lost=lost,
                leased=leased,
                again=again,
                failed=reason == "error",
            )
            if change.code is Code.OK:
                entry = broker.ledger.jobs[job]
                if again and entry.text_end:
                    reason, error = entry.text_end, ""
                if entry.state is JobState.DONE:
                    broker.note_end(job, reason, error, None, cause)
                broker.wakes += 1
            broker.carry_out(change)
            broker.changed.notify_all()
        return change.code

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        with self._broker.changed:
            self._broker.changed.wait_for(lambda: self._output(job, cursor), timeout=block_seconds)
            return self._output(job, cursor)

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
                    return list(dict.fromkeys(recordings[RunKey(job, epoch)]))
        return []

    def wait_for_change(self, block_seconds: float) -> None:
        broker = self._broker
        with broker.changed:
            broker.changed.wait_for(lambda: broker.wakes > self._wakes_seen, timeout=block_seconds)
            self._wakes_seen = broker.wakes

    def claim(
        self,
        role: str,
        token: str,
        info: Mapping[str, object],
        lifetime_ms: int = TERMS.shortest_ms,
    ) -> int:
        broker = self._broker
        with broker.changed:
            held = self._leases().get(role)
            if held is not None and held[0] != token:
                return 0
            until = time.monotonic() + lifetime_ms / 1000
            broker.leases[role] = (token, json.dumps(info), until)
            return broker.ledger.claim(role, token)

    def release(self, role: str, token: str, *, leaves: bool = False) -> None:
        with self._broker.changed:
            if leaves:
                self._broker.ledger.leave(role, token)
            if self._broker.leases.get(role, ("", "", 0.0))[0] == token:
                del self._broker.leases[role]

    def claims(self) -> dict[str, Claim]:
        ledger = self._broker.ledger
        with self._broker.changed:
            return {
                role: Claim(token, json.loads(info), ledger.generation(role, token))
                for role, (token, info) in self._leases().items()
            }

    def _leases(self) -> dict[str, tuple[str, str]]:
        """Token and facts of the leases in force, by role."""
        now = time.monotonic()
        held = self._broker.leases.items()
        return {role: (token, info) for role, (token, info, until) in held if until > now}

    def set_pipeline(self, record: Mapping[str, str], by: int | None = None) -> Code:
        with self._broker.changed:
            if not self._broker.ledger.is_latest(_scheduler(by)):
                return Code.STALE
            self._broker.record = dict(record)
        return Code.OK

    def pipeline(self) -> dict[str, str]:
        with self._broker.changed:
            return dict(self._broker.record)

    def place(self, job: str) -> Code:
        entry = self._broker.ledger.jobs.get(job)
        gone = entry is None or entry.state is JobState.DONE
        return Code.STALE if gone else Code.DUP  # nobody takes a job's place

    def drop_mistyped(self) -> bool:
        return False  # every key has its type

    def check_writes(self) -> None:
        """As in ``Control``; there is always room."""

    def eviction(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to close."""


def _scheduler(generation: int | None) -> Holder | None:
    """The scheduler of ``generation``; None: somebody else decides."""
    return None if generation is None else Holder(role_of(SCHEDULER), generation)
