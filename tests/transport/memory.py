"""A broker in memory, for tests, with the contract, codec and codes of the Redis broker.

The rules are the ledger's (``core.protocol.ledger``); this module adds logs, rows, outputs and
blocking reads.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flowspec.core.protocol.addresses import SCHEDULER, Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.ledger import Change, Delivery, Ledger
from flowspec.core.protocol.machine import Complete, Finish, OpenJob, Send
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError
from flowspec.transport.base import (
    LOG_CAP,
    RECORDING_CAP,
    ROWS_CAP,
    CommitText,
    Intake,
    Op,
    PutRows,
    ReadResult,
    Record,
    Rows,
)
from flowspec.transport.wire import codec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _LogEntry:
    """An entry of a log; ``parts``: sender, sequence number and message of each of its messages."""

    parts: tuple[tuple[Address, int, bytes], ...]
    stamp: Stamp | None


class _Entries(Generic[T]):
    """Entries with numbers from 0 on, of which the first ones may have been removed."""

    def __init__(self) -> None:
        self._kept: list[T] = []
        self._first = 0

    @property
    def end(self) -> int:
        """The number of the next entry."""
        return self._first + len(self._kept)

    def append(self, entry: T) -> None:
        """Append ``entry``."""
        self._kept.append(entry)

    def behind(self, number: int) -> list[T]:
        """The entries from ``number`` on."""
        return self._kept[max(0, number - self._first) :]

    def trim(self, number: int) -> None:
        """Remove the entries before ``number``."""
        del self._kept[: max(0, number - self._first)]
        self._first = max(self._first, number)

    def __len__(self) -> int:
        return len(self._kept)


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
        self.logs: dict[Address, _Entries[_LogEntry]] = defaultdict(_Entries)
        self.rows: dict[Address, _Entries[tuple[RunKey, int, bytes]]] = defaultdict(_Entries)
        self.jobs: dict[str, MemoryJob] = {}
        self.recordings: dict[RunKey, list[str]] = {}
        self.intake: list[Intake] = []
        self.unacknowledged: list[Intake] = []  # read from the intake
        self.submitted_at: list[float] = []  # by job, in the order of their ids
        self.wakes = 0  # admissions and ends, which wake the scheduler
        self.leases: dict[str, tuple[str, str, float]] = {}
        self.record: dict[str, str] = {}
        self.followed: dict[str, float] = {}  # by job, until when somebody says that it waits

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
        self.logs[first.to].append(_LogEntry(parts, first.stamp))

    def publish_together(
        self, bundle: Bundle, stamp: Stamp | None, by: Holder | None
    ) -> list[Code]:
        """Append the messages of ``bundle`` that pass as one entry; a code for each."""
        changes = self.ledger.publish_together(bundle.sends, stamp, by)
        passed = [delivery for change in changes for delivery in change.deliveries]
        if passed:
            self._append(passed)
        return [change.code for change in changes]

    def commit(self, op: CommitText, stamp: Stamp | None, by: Holder | None) -> Code:
        commit = op.commit
        code = self.carry_out(self.ledger.commit(commit, stamp, by))
        if code is Code.OK:
            entry = {
                "kind": "tokens",
                "offset": str(commit.emitted),
                "ids": json.dumps(commit.tokens),
                "text": op.text,
                "sizes": op.sizes,
            }
            if op.logprobs:
                entry["logprobs"] = op.logprobs
            if commit.finish:
                entry["finish_reason"] = commit.finish
            if stamp is not None:
                entry["at"] = repr(stamp.at)
            self.jobs[commit.run.job].output.append(entry)
        return code

    def open_job(self, op: OpenJob, by: Holder | None) -> Code:
        code = self.ledger.open(op, by)
        if code is Code.OK:
            self.jobs[op.run.job].facts |= {
                "prompt_token_ids": json.dumps(op.prompt_ids),
                "strategy": op.strategy,
            }
        return code

    def finish(self, op: Finish, by: Holder | None) -> Code:
        code = self.ledger.finish(op.run, by, failed=op.reason == "error")
        if code is Code.OK:
            self.note_end(op.run.job, op.reason, op.error, op.stats, op.cause)
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
    """``address``'s link; see ``base.Link``. ``holder``: its hold on its role; None: no lease."""

    def __init__(
        self, broker: MemoryBroker, address: Address, holder: Holder | None = None
    ) -> None:
        self.address = address
        self._holder = holder
        self._broker = broker
        self._log_at = broker.logs[address].end
        self._rows_at = broker.rows[address].end
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
            log = broker.logs[self.address].behind(self._log_at)
            rows = broker.rows[self.address].behind(self._rows_at)
            self._log_at = broker.logs[self.address].end
            self._rows_at = broker.rows[self.address].end
            if self._is_latest:
                broker.rows[self.address].trim(self._rows_at)
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
        """Remove what earlier reads have returned, unless another worker reads on."""
        if self._is_latest:
            self._broker.logs[self.address].trim(self._log_at)
            self._broker.ledger.trim(self.address, self._read)

    @property
    def _is_latest(self) -> bool:
        return self._broker.ledger.is_latest(self._holder)

    def _has_news(self) -> bool:
        broker = self._broker
        unread = broker.logs[self.address].end > self._log_at
        return unread or broker.rows[self.address].end > self._rows_at

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
                    codes += self._broker.publish_together(op, stamp, self._holder)
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
                return broker.carry_out(broker.ledger.publish(op, stamp, self._holder))
            case PutRows(to, run, segment, rows):
                waiting = broker.rows[to]
                code = Code.FULL if len(waiting) >= ROWS_CAP else Code.OK
                waiting.append((run, segment, codec.encode_rows(rows)))
                return code
            case CommitText():
                return broker.commit(op, stamp, self._holder)
            case Complete():
                return broker.carry_out(broker.ledger.complete(op, stamp, self._holder))
            case OpenJob():
                return broker.open_job(op, self._holder)
            case Finish():
                return broker.finish(op, self._holder)
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
