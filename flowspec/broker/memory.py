"""The broker in one process: same contract as Redis, same codec, same codes; for tests and
simulations.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.broker import codec
from flowspec.broker.base import (
    LOG_CAP,
    ROWS_CAP,
    CommitText,
    Delivery,
    Intake,
    Op,
    PutRows,
    Record,
    Rows,
)
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.machine import Accepted, Complete, Finish, Send
from flowspec.core.protocol.messages import DRAFT, GRAPH, Envelope, Message, Task
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.protocol.stamps import Stamp
from flowspec.errors import GapError


@dataclass(slots=True)
class MemoryJob:
    """A job's hash, graph, output and recording."""

    fields: dict[str, str]
    state: str = "queued"
    epoch: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    offset: int | None = None
    seqs: dict[tuple[str, str], int] = field(default_factory=dict)
    graph: TaskGraph = field(default_factory=TaskGraph)
    graph_seqs: SeqWriter = field(default_factory=SeqWriter)
    created: dict[str, Stamp] = field(default_factory=dict)  # tasks of an emulated run
    done: dict[str, Stamp] = field(default_factory=dict)
    output: list[dict[str, str]] = field(default_factory=list)
    recording: list[str] = field(default_factory=list)


class MemoryBroker:
    """All state of one broker. ``log_cap`` as in ``base``."""

    def __init__(self, *, log_cap: int = LOG_CAP) -> None:
        self.log_cap = log_cap
        self.changed = threading.Condition()
        self.logs: dict[
            str, list[tuple[str, int, bytes, Stamp | None]]
        ] = {}  # sender, seq, envelope
        self.rows: dict[str, list[tuple[str, int, int, bytes]]] = {}
        self.jobs: dict[str, MemoryJob] = {}
        self.intake: list[Intake] = []
        self.submitted = 0
        self.queue: list[str] = []
        self.running: set[str] = set()
        self.leases: dict[str, tuple[str, str, float]] = {}
        self.idempotency: dict[str, str] = {}
        self.record: dict[str, str] = {}

    # ---- scripts ---------------------------------------------------------------------------------

    def fenced(self, job: str, epoch: int) -> MemoryJob | None:
        """The job if it runs under exactly ``epoch``."""
        known = self.jobs.get(job)
        return (
            known
            if known is not None and known.state == "running" and known.epoch == epoch
            else None
        )

    def append(
        self, node: str, sender: str, seq: int, message: Message, stamp: Stamp | None = None
    ) -> None:
        """One more entry of a log."""
        self.logs.setdefault(node, []).append((sender, seq, codec.encode(message), stamp))

    def has_room(self, node: str) -> bool:
        """Whether a log may take one more entry."""
        return len(self.logs.get(node, ())) < self.log_cap

    def publish(self, op: Send, stamp: Stamp | None) -> Code:
        message = op.envelope.message
        envelope = op.envelope
        job = self.fenced(message.job, message.epoch)
        if job is None:
            return Code.STALE
        answer = Code.OK
        key = (envelope.sender, op.to)
        created: tuple[Task, ...] = ()
        if not op.task and envelope.seq > job.seqs.get(key, 0) + 1:
            return Code.GAP
        if job.graph.knows(op.task) if op.task else envelope.seq <= job.seqs.get(key, 0):
            answer = Code.DUP
        elif not self.has_room(op.to):
            return Code.FULL
        if op.task:
            created = (Task(message.job, op.task, op.after, op.to, envelope),)
        elif answer is Code.OK:
            self.append(op.to, envelope.sender, envelope.seq, message, stamp)
            job.seqs[key] = envelope.seq
        self.graph_step(job, op.completes, stamp, created)
        return answer

    def graph_step(
        self,
        job: MemoryJob,
        completes: Sequence[str],
        stamp: Stamp | None,
        created: Sequence[Task] = (),
    ) -> None:
        """Advance the graph and deliver what it lets go."""
        if stamp is not None:
            job.created |= {task.name: stamp for task in created if task.name not in job.created}
            job.done |= {name: stamp for name in completes if name not in job.done}
        for task in job.graph.apply(completes, created):
            if task.envelope is not None:
                waited = [job.done.get(name) for name in task.after]
                known = (stamp, job.created.get(task.name), *waited)
                latest = max(filter(None, known), key=lambda found: found.at, default=None)
                self.append(
                    task.to, GRAPH, job.graph_seqs.next(task.to), task.envelope.message, latest
                )

    def commit(self, op: CommitText, stamp: Stamp | None) -> Code:
        commit = op.commit
        job = self.fenced(commit.job, commit.epoch)
        if job is None:
            return Code.STALE
        if job.offset is None or commit.offset > job.offset:
            return Code.GAP
        if commit.offset < job.offset:
            return Code.DUP
        for node, prune in zip(commit.to, commit.prunes, strict=True):
            if prune.seq != job.seqs.get((DRAFT, node), 0) + 1:
                return Code.GAP
            if not self.has_room(node):
                return Code.FULL
        if len(job.output) >= self.log_cap:
            return Code.FULL
        for node, prune in zip(commit.to, commit.prunes, strict=True):
            self.append(node, DRAFT, prune.seq, prune.message, stamp)
            job.seqs[DRAFT, node] = prune.seq
        entry = {
            "kind": "tokens",
            "offset": str(commit.emitted),
            "ids": json.dumps(commit.tokens),
            "text": op.text,
        }
        entry |= {"finish_reason": commit.finish} if commit.finish else {}
        job.output.append(entry | ({"at": repr(stamp.at)} if stamp is not None else {}))
        job.offset = commit.offset + commit.advance
        self.graph_step(job, commit.completes, stamp)
        return Code.OK

    def open_job(self, op: Accepted) -> Code:
        job = self.fenced(op.job, op.epoch)
        if job is None:
            return Code.STALE
        if job.offset is not None:
            return Code.DUP
        job.offset = len(op.prompt_ids) - 1
        job.facts |= {"prompt_token_ids": json.dumps(op.prompt_ids), "strategy": op.strategy}
        return Code.OK

    def end(self, name: str, reason: str, error: str, stats: Mapping[str, object] | None) -> None:
        """Close a job's books."""
        job = self.jobs[name]
        if error:
            job.output.append({"kind": "error", "text": error})
        end = {"kind": "end", "finish_reason": reason}
        job.output.append(end | ({"stats": json.dumps(stats)} if stats is not None else {}))
        job.state = "done"
        job.facts["finish_reason"] = reason
        job.graph = TaskGraph()
        self.running.discard(name)


class MemoryLink:
    """``node``'s link; see ``base.Link``."""

    def __init__(self, broker: MemoryBroker, node: str) -> None:
        self.node = node
        self._broker = broker
        self._log_at = len(broker.logs.get(node, ()))
        broker.rows.pop(node, None)
        self._rows: dict[tuple[str, int, int], Rows] = {}

    def read(self, block_seconds: float) -> Delivery:
        broker = self._broker
        with broker.changed:
            broker.changed.wait_for(self._has_news, timeout=block_seconds)
            log = broker.logs.get(self.node, [])[self._log_at :]
            rows = broker.rows.pop(self.node, [])
            self._log_at += len(log)
        for job, epoch, segment, data in rows:
            self._rows[job, epoch, segment] = codec.decode_rows(data)
        envelopes = tuple(Envelope(sender, seq, codec.decode(data)) for sender, seq, data, _ in log)
        stamps = tuple(stamp for *_, stamp in log)
        return Delivery(envelopes, stamps=stamps if any(stamps) else ())

    def _has_news(self) -> bool:
        broker = self._broker
        return len(broker.logs.get(self.node, ())) > self._log_at or bool(
            broker.rows.get(self.node)
        )

    def take_rows(self, job: str, epoch: int, segment: int) -> Rows:
        rows = self._rows.pop((job, epoch, segment), None)
        if rows is None:
            raise GapError(f"the rows of segment {segment} did not arrive at {self.node}")
        return rows

    def drop_rows(self, job: str, segment: int) -> None:
        self._rows = {
            name: rows for name, rows in self._rows.items() if (name[0], name[2]) != (job, segment)
        }

    def write(self, ops: Sequence[Op], at: float | None = None) -> list[Code]:
        stamp = None if at is None else Stamp(at, self.node)
        with self._broker.changed:
            codes = [self._perform(op, stamp) for op in ops]
            self._broker.changed.notify_all()
        return codes

    def _perform(self, op: Op, stamp: Stamp | None) -> Code:
        broker = self._broker
        match op:
            case Send():
                return broker.publish(op, stamp)
            case PutRows(to, job, epoch, segment, rows):
                waiting = broker.rows.setdefault(to, [])
                waiting.append((job, epoch, segment, codec.encode_rows(rows)))
                return Code.FULL if len(waiting) >= ROWS_CAP else Code.OK
            case CommitText():
                return broker.commit(op, stamp)
            case Complete(job, epoch, tasks):
                known = broker.fenced(job, epoch)
                if known is None:
                    return Code.STALE
                broker.graph_step(known, tasks, stamp)
            case Accepted():
                return broker.open_job(op)
            case Finish(job, epoch, reason, error, stats):
                if broker.fenced(job, epoch) is None:
                    return Code.STALE
                broker.end(job, reason, error, stats)
            case Record(job, line):
                broker.jobs[job].recording.append(line)
        return Code.OK

    def forget(self, job: str) -> None:
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != job}

    def close(self) -> None:
        """Nothing to give back."""
