"""A broker in memory, for tests, with the contract, codec and codes of the Redis broker.

The rules are the ledger's (``core.protocol.ledger``); this module adds logs, rows, outputs and
blocking reads.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.broker import codec
from flowspec.broker.base import (
    FAILED,
    LOG_CAP,
    RECORDING_CAP,
    REFUSED,
    ROWS_CAP,
    CommitText,
    Intake,
    Op,
    PutRows,
    ReadResult,
    Record,
    Rows,
)
from flowspec.core.protocol.addresses import SCHEDULER, Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.ledger import Change, Delivery, Ledger
from flowspec.core.protocol.machine import Complete, Finish, OpenJob, Send
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError


@dataclass(frozen=True, slots=True)
class _LogEntry:
    """An entry of a log; ``parts``: sender, sequence number and message of each of its messages."""

    parts: tuple[tuple[Address, int, bytes], ...]
    stamp: Stamp | None


@dataclass(slots=True)
class MemoryJob:
    """A job's facts and output, which the ledger does not keep."""

    facts: dict[str, str] = field(default_factory=dict)
    output: list[dict[str, str]] = field(default_factory=list)


class MemoryBroker:
    """All state of one broker. ``log_cap`` as in ``base``."""

    def __init__(self, *, log_cap: int = LOG_CAP) -> None:
        self.ledger = Ledger(log_cap)
        self.changed = threading.Condition()
        self.logs: dict[Address, list[_LogEntry]] = {}
        self.rows: dict[Address, list[tuple[RunKey, int, bytes]]] = {}
        self.jobs: dict[str, MemoryJob] = {}
        self.recordings: dict[RunKey, list[str]] = {}
        self.intake: list[Intake] = []
        self.unacknowledged: list[Intake] = []  # read from the intake
        self.submitted_at: list[float] = []  # by job, in the order of their ids
        self.wakes = 0  # admissions and ends, which wake the scheduler
        self.leases: dict[str, tuple[str, str, float]] = {}
        self.record: dict[str, str] = {}

    def submit(self, fields: Mapping[str, str]) -> str:
        """Append a submission to the intake; its id."""
        self.submitted_at.append(time.monotonic())
        job = f"{len(self.submitted_at)}-0"
        self.intake.append(Intake(job, dict(fields)))
        return job

    def queued_seconds(self, job: str) -> float:
        """Seconds since ``job`` was submitted."""
        number = int(job.partition("-")[0])
        return time.monotonic() - self.submitted_at[number - 1]

    def carry_out(self, change: Change) -> Code:
        """Append the deliveries of a ledger's change to the logs; its code."""
        for delivery in change.deliveries:
            self._append([delivery])
        return change.code

    def _append(self, deliveries: Sequence[Delivery]) -> None:
        """Append one entry with ``deliveries``, all to one log and with one stamp."""
        parts = tuple(
            (one.envelope.sender, one.envelope.seq, codec.encode(one.envelope.message))
            for one in deliveries
        )
        first = deliveries[0]
        self.logs.setdefault(first.to, []).append(_LogEntry(parts, first.stamp))

    def publish_together(self, bundle: Bundle, stamp: Stamp | None) -> list[Code]:
        """Append the messages of ``bundle`` that pass as one entry; a code for each."""
        changes = self.ledger.publish_together(bundle.sends, stamp)
        passed = [delivery for change in changes for delivery in change.deliveries]
        if passed:
            self._append(passed)
        return [change.code for change in changes]

    def commit(self, op: CommitText, stamp: Stamp | None) -> Code:
        commit = op.commit
        code = self.carry_out(self.ledger.commit(commit, stamp))
        if code is Code.OK:
            entry = {
                "kind": "tokens",
                "offset": str(commit.emitted),
                "ids": json.dumps(commit.tokens),
                "text": op.text,
            }
            if commit.finish:
                entry["finish_reason"] = commit.finish
            if stamp is not None:
                entry["at"] = repr(stamp.at)
            self.jobs[commit.run.job].output.append(entry)
        return code

    def open_job(self, op: OpenJob) -> Code:
        code = self.ledger.open(op)
        if code is Code.OK:
            self.jobs[op.run.job].facts |= {
                "prompt_token_ids": json.dumps(op.prompt_ids),
                "strategy": op.strategy,
            }
        return code

    def finish(self, op: Finish) -> Code:
        code = self.ledger.finish(op.run)
        if code is Code.OK:
            opened = self.ledger.jobs[op.run.job].offset is not None
            cause = FAILED if opened else REFUSED
            self.note_end(op.run.job, op.reason, op.error, op.stats, cause)
            self.wakes += 1
        return code

    def note_end(
        self, job: str, reason: str, error: str, stats: Mapping[str, object] | None, cause: str
    ) -> None:
        """Write a job's end into its output; ``cause``: that of ``error``, if there is one."""
        known = self.jobs[job]
        if error:
            known.output.append({"kind": "error", "text": error, "cause": cause})
        end = {"kind": "end", "finish_reason": reason}
        if stats is not None:
            end["stats"] = json.dumps(stats)
        known.output.append(end)
        known.facts["finish_reason"] = reason


class MemoryLink:
    """``address``'s link; see ``base.Link``."""

    def __init__(self, broker: MemoryBroker, address: Address) -> None:
        self.address = address
        self._broker = broker
        self._log_at = len(broker.logs.get(address, ()))
        broker.rows.pop(address, None)
        self._rows: dict[tuple[RunKey, int], Rows] = {}
        self._ended = EndedRuns()  # runs whose late rows are dropped
        self._recorded: Counter[RunKey] = Counter()
        self._bundles = 0  # entries read with messages of several runs
        self._read: Counter[RunKey] = Counter()  # entries read, but for those of the scheduler

    def read(self, block_seconds: float) -> ReadResult:
        broker = self._broker
        with broker.changed:
            self._trim()
            broker.changed.wait_for(self._has_news, timeout=block_seconds)
            log = broker.logs.get(self.address, [])[self._log_at :]
            rows = broker.rows.pop(self.address, [])
            self._log_at += len(log)
        for run, segment, data in rows:
            if run not in self._ended:
                self._rows[run, segment] = codec.decode_rows(data)
        envelopes = tuple(envelope for entry in log for envelope in self._envelopes(entry))
        counted = [one.message.run for one in envelopes if one.sender != SCHEDULER]
        self._read.update(run for run in counted if run not in self._ended)
        stamps = tuple(entry.stamp for entry in log for _ in entry.parts)
        return ReadResult(envelopes, stamps=stamps if any(stamps) else ())

    def _envelopes(self, entry: _LogEntry) -> list[Envelope]:
        self._bundles += len(entry.parts) > 1
        bundle = self._bundles if len(entry.parts) > 1 else 0
        return [
            Envelope(sender, seq, codec.decode(data), bundle) for sender, seq, data in entry.parts
        ]

    def _trim(self) -> None:
        """Remove what earlier reads have returned."""
        del self._broker.logs.get(self.address, [])[: self._log_at]
        self._broker.ledger.trim(self.address, self._read)
        self._log_at = 0

    def _has_news(self) -> bool:
        broker = self._broker
        unread = len(broker.logs.get(self.address, ())) > self._log_at
        return unread or bool(broker.rows.get(self.address))

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        rows = self._rows.pop((run, segment), None)
        if rows is None:
            raise GapError(f"the rows of segment {segment} did not arrive at {self.address}")
        return rows

    def drop_rows(self, run: RunKey, segment: int) -> None:
        self._rows.pop((run, segment), None)

    def write(self, ops: Sequence[Op], stamps: Sequence[Stamp | None] | None = None) -> list[Code]:
        with self._broker.changed:
            codes: list[Code] = []
            for op, stamp in zip(ops, stamps or [None] * len(ops), strict=True):
                if isinstance(op, Bundle):
                    codes += self._broker.publish_together(op, stamp)
                else:
                    codes.append(self._perform(op, stamp))
            self._broker.changed.notify_all()
        return codes

    def _perform(
        self,
        op: PutRows | Send | CommitText | Complete | OpenJob | Finish | Record,
        stamp: Stamp | None,
    ) -> Code:
        broker = self._broker
        match op:
            case Send():
                return broker.carry_out(broker.ledger.publish(op, stamp))
            case PutRows(to, run, segment, rows):
                waiting = broker.rows.setdefault(to, [])
                code = Code.FULL if len(waiting) >= ROWS_CAP else Code.OK
                waiting.append((run, segment, codec.encode_rows(rows)))
                return code
            case CommitText():
                return broker.commit(op, stamp)
            case Complete():
                return broker.carry_out(broker.ledger.complete(op, stamp))
            case OpenJob():
                return broker.open_job(op)
            case Finish():
                return broker.finish(op)
            case Record(run, line):
                self._recorded[run] += 1
                if self._recorded[run] <= RECORDING_CAP:
                    broker.recordings.setdefault(run, []).append(line)
                return Code.OK

    def forget(self, run: RunKey) -> None:
        self._ended.add(run)
        self._recorded.pop(run, None)
        self._read.pop(run, None)
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != run}

    def close(self) -> None:
        """Nothing to close."""
