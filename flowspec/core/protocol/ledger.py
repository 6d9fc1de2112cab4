"""The rules of a pipeline's shared state, on which its processes must agree.

A ledger holds every job's state, ownership epoch and context offset, every run's sequence numbers
and task graph, and the queue. Each method is one atomic change: it returns OK and makes all its
changes, or returns another code and changes nothing but what its docstring says. The in-memory
broker and the simulation add logs and links to a ledger. The Lua scripts make the same changes on a
server and pass the same tests.

Epochs are fences: a running job runs under exactly one epoch, which only ``assign`` and ``revoke``
raise. A change for another run of the job is STALE. So is one by a worker that the run was not
assigned to, or under another generation (``holders``). ``assign`` creates the state of a run, which
is its sequence numbers and its task graph; the end of the run drops it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowspec.core.protocol.addresses import DRAFT, GRAPH, SCHEDULER, Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.graph import Task, TaskGraph
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.machine import Commit, Complete, OpenJob, Send
from flowspec.core.protocol.messages import Earlier, Envelope, Revoke, Submit
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey

#: Cap that is never reached.
UNBOUNDED = 1 << 62


class JobState(enum.Enum):
    """The state of a job; the value is its form in the broker."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Delivery(NamedTuple):
    """An envelope to append to the log of ``to``.

    ``task``: the graph task that held it; empty: it was not held.
    """

    to: Address
    envelope: Envelope
    stamp: Stamp | None = None
    task: str = ""


class Change(NamedTuple):
    """The result of a change, and its deliveries in order."""

    code: Code
    deliveries: tuple[Delivery, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of admitting a job.

    ``refused``: why it was refused, one line; empty: it was not. ``duplicate_of``: the job with the
    same idempotency key and fields.
    """

    code: Code
    refused: str = ""
    duplicate_of: str = ""


@dataclass(slots=True)
class _RunState:
    """The state of one run of a job.

    ``appended``, ``trimmed``: by receiver, entries of its log, and of these read and removed.
    """

    seqs: dict[tuple[Address, Address], int] = field(default_factory=dict)
    appended: dict[Address, int] = field(default_factory=dict)
    trimmed: dict[Address, int] = field(default_factory=dict)
    graph: TaskGraph = field(default_factory=TaskGraph)
    graph_seqs: SeqWriter = field(default_factory=SeqWriter)


@dataclass(slots=True)
class JobEntry:
    """The state of one job.

    ``offset``: context length after the last commit; None before the job was opened. ``emitted``:
    tokens in its output. ``entries``: entries of its output. ``holders``: generations by role of
    the workers that it was assigned to. ``again``: how often it was put back. ``text_end``: why its
    text is complete; empty: it is not. ``failed``: whether it ended with an error.
    """

    fields: tuple[tuple[str, str], ...]
    state: JobState = JobState.QUEUED
    epoch: int = 0
    offset: int | None = None
    emitted: int = 0
    entries: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)
    again: int = 0
    text_end: str = ""
    failed: bool = False
    run: _RunState = field(default_factory=_RunState)

    @property
    def graph(self) -> TaskGraph:
        """The task graph of the current run."""
        return self.run.graph


class Ledger:
    """The state of one pipeline.

    ``cap``: most entries of a run that wait in a log, and most entries of a job's output. What the
    scheduler sends is not counted. Changes are made ``by`` a holder; None: by one that needs no
    lease, as in a simulation.
    """

    def __init__(self, cap: int = UNBOUNDED) -> None:
        self.cap = cap
        self.jobs: dict[str, JobEntry] = {}
        self.queue: list[str] = []
        self.running: set[str] = set()
        self._idempotency: dict[str, str] = {}
        self._claims: dict[str, tuple[int, str]] = {}  # role -> generation and token of the latest
        self._left: dict[str, int] = {}  # role -> generation of the latest holder that has left it

    # ---- roles -----------------------------------------------------------------------------------

    def claim(self, role: str, token: str) -> int:
        """Note that ``token`` has taken or renewed the lease on ``role``; its generation."""
        generation, latest = self._claims.get(role, (0, ""))
        if latest != token:
            generation += 1
            self._claims[role] = (generation, token)
        return generation

    def leave(self, role: str, token: str) -> None:
        """Note that ``token`` has left ``role`` on purpose, if it was the latest to claim it."""
        if generation := self.generation(role, token):
            self._left[role] = generation

    def generation(self, role: str, token: str) -> int:
        """The generation of ``token`` if it is the latest to have claimed ``role``; else 0."""
        generation, latest = self._claims.get(role, (0, ""))
        return generation if latest == token else 0

    def is_latest(self, holder: Holder | None) -> bool:
        """Whether nobody has claimed the role since ``holder``; None: it needs no lease."""
        return holder is None or self._claims.get(holder.role, (0, ""))[0] == holder.generation

    # ---- jobs ------------------------------------------------------------------------------------

    def admit(
        self, job: str, fields: Mapping[str, str], most_queued: int, refused: str = ""
    ) -> Admission:
        """Put a job into the queue, which holds at most ``most_queued`` jobs, or end it at once.

        The fields of a job that is ended are not kept: they are not used again, and may be large.

        ``refused``: why the job cannot be served, one line; it is ended. DUP: it was admitted
        before; or another job that has not failed has its idempotency key, and it is ended. FULL:
        the queue is full, and it is ended.
        """
        if job in self.jobs:
            return Admission(Code.DUP)
        admission = Admission(Code.OK, refused)
        key = fields.get("idempotency_key", "")
        earlier = self._holder_of(key)
        if not refused and earlier and dict(self.jobs[earlier].fields) != dict(fields):
            why = f"the idempotency key belongs to job {earlier} with other fields; use another key"
            admission = Admission(Code.DUP, why)
        elif not refused and earlier:
            why = f"the idempotency key belongs to job {earlier}"
            admission = Admission(Code.DUP, why, earlier)
        elif not refused and len(self.queue) >= most_queued:
            why = f"the queue is full: {most_queued} jobs wait already; submit again later"
            admission = Admission(Code.FULL, why)
        if admission.refused:
            self.jobs[job] = JobEntry((), JobState.DONE)
            return admission
        self.jobs[job] = JobEntry(tuple(fields.items()))
        self.queue.append(job)
        if key:
            self._idempotency[key] = job
        return admission

    def _holder_of(self, key: str) -> str:
        """The job that has the idempotency key ``key``; empty: none, or it has failed."""
        job = self._idempotency.get(key, "") if key else ""
        return job if job and not self.jobs[job].failed else ""

    def assign(
        self,
        job: str,
        most_running: int,
        queued_seconds: float = 0.0,
        *,
        holders: Mapping[str, int] | None = None,
        earlier: Earlier | None = None,
        by: Holder | None = None,
    ) -> Change:
        """Assign a waiting job to the workers ``holders``, as a new run.

        ``holders``: generations by role, in the order of the pipeline's workers. ``earlier``: what
        its earlier runs have left. GAP: ``job`` does
        not wait. STALE: one of them, or the scheduler, is not the latest that has claimed its role.
        FULL: ``most_running`` jobs run already.
        """
        if job not in self.queue:
            return Change(Code.GAP)
        holders = holders or {}
        if not all(map(self.is_latest, (by, *(Holder(*known) for known in holders.items())))):
            return Change(Code.STALE)
        if len(self.running) >= most_running:
            return Change(Code.FULL)
        self.queue.remove(job)
        self.running.add(job)
        entry = self.jobs[job]
        entry.state = JobState.RUNNING
        entry.epoch += 1
        entry.holders = dict(holders)
        entry.run = _RunState()
        generations = tuple(holders.values())
        message = Submit(
            RunKey(job, entry.epoch), entry.fields, queued_seconds, generations, earlier
        )
        return Change(Code.OK, (Delivery(DRAFT, Envelope(SCHEDULER, 1, message)),))

    def finish(self, run: RunKey, by: Holder | None = None, *, failed: bool = False) -> Code:
        """End a run and its job, on behalf of its owner; ``failed``: with an error."""
        entry = self._fenced(run, by)
        if entry is None:
            return Code.STALE
        entry.failed = failed
        self._end(run.job, entry)
        return Code.OK

    def revoke(
        self,
        job: str,
        workers: Sequence[Address],
        *,
        by: Holder | None = None,
        lost: Holder | None = None,
        leased: bool = False,
        again: int = 0,
        failed: bool = False,
    ) -> Change:
        """End a job from outside, or put it back; if it runs, send Revoke to ``workers``.

        Raises the epoch, so that later writes of its owners are refused. ``lost``: the worker for
        whose loss it ends; ``leased``: a lease on its role is in force. ``again``: how many times a
        running job may be put back in front of the queue; a worker that has left its role does not
        count. A job whose text is complete ends in any case. ``failed``: it ends with an error.
        DUP: it has ended, or is unknown. STALE: the scheduler is not the latest, or the worker is
        not lost.
        """
        entry = self.jobs.get(job)
        if entry is None or entry.state is JobState.DONE:
            return Change(Code.DUP)
        if not self.is_latest(by) or (lost is not None and leased and self.is_latest(lost)):
            return Change(Code.STALE)
        is_running = entry.state is JobState.RUNNING
        counts = lost is None or self._left.get(lost.role) != lost.generation
        may_go_on = is_running and again > 0 and not entry.text_end
        told: Sequence[Address] = workers if is_running else ()
        if not is_running:
            self.queue.remove(job)
        entry.epoch += 1
        message = Revoke(RunKey(job, entry.epoch))
        deliveries = tuple(Delivery(to, Envelope(SCHEDULER, 0, message)) for to in told)
        self._end(job, entry)
        if may_go_on and (not counts or entry.again < again):
            entry.state = JobState.QUEUED
            entry.holders = {}
            entry.again += counts
            self.queue.insert(0, job)
        else:
            entry.failed = failed and not (is_running and again > 0 and entry.text_end)
        return Change(Code.OK, deliveries)

    def _end(self, job: str, entry: JobEntry) -> None:
        entry.state = JobState.DONE
        entry.run = _RunState()
        self.running.discard(job)

    # ---- runs ------------------------------------------------------------------------------------

    def _fenced(self, run: RunKey, by: Holder | None = None) -> JobEntry | None:
        """The run's job; None unless it runs under exactly this epoch, and is that of ``by``."""
        entry = self.jobs.get(run.job)
        if entry is None or entry.state is not JobState.RUNNING or entry.epoch != run.epoch:
            return None
        owned = by is None or entry.holders.get(by.role) == by.generation
        return entry if owned else None

    def open(self, accepted: OpenJob, by: Holder | None = None) -> Code:
        """Set the offset from the prompt, before any commit. DUP: the job was opened before."""
        entry = self._fenced(accepted.run, by)
        if entry is None:
            return Code.STALE
        if entry.offset is not None:
            return Code.DUP
        entry.offset = len(accepted.prompt_ids) - 1
        return Code.OK

    def publish(self, send: Send, stamp: Stamp | None = None, by: Holder | None = None) -> Change:
        """Deliver one message, at once or as a task of the run's graph, and complete tasks.

        Numbers may be left out: those messages went straight to the receiver, which finds gaps.
        FULL: the run has ``cap`` entries in the receiver's log. DUP: the sequence number, a later
        one or the task is known; only the completions are carried out.
        """
        envelope = send.envelope
        run = envelope.message.run
        entry = self._fenced(run, by)
        if entry is None:
            return Change(Code.STALE)
        state = entry.run
        channel = (envelope.sender, send.to)
        if send.task:
            known = state.graph.knows(send.task)
        else:
            known = envelope.seq <= state.seqs.get(channel, 0)
        if known:
            return Change(Code.DUP, tuple(self._advance(state, send.completes, (), stamp)))
        if not self._has_room(state, send.to):
            return Change(Code.FULL)
        if send.task:
            task = Task(send.task, send.after, send.to, envelope)
            deliveries = self._advance(state, send.completes, (task,), stamp)
            return Change(Code.OK, tuple(deliveries))
        state.seqs[channel] = envelope.seq
        delivered = self._append(state, send.to, envelope, stamp)
        if not send.completes:
            return Change(Code.OK, (delivered,))
        return Change(Code.OK, (delivered, *self._advance(state, send.completes, (), stamp)))

    def publish_together(
        self, sends: Sequence[Send], stamp: Stamp | None = None, by: Holder | None = None
    ) -> tuple[Change, ...]:
        """``publish`` for each message of a bundle; their deliveries are one entry."""
        return tuple(self.publish(send, stamp, by) for send in sends)

    def complete(
        self, complete: Complete, stamp: Stamp | None = None, by: Holder | None = None
    ) -> Change:
        """Complete tasks of the run's graph."""
        entry = self._fenced(complete.run, by)
        if entry is None:
            return Change(Code.STALE)
        return Change(Code.OK, tuple(self._advance(entry.run, complete.tasks, (), stamp)))

    def commit(
        self, commit: Commit, stamp: Stamp | None = None, by: Holder | None = None
    ) -> Change:
        """Move the run forward: advance the offset, put the prunes into the logs, complete tasks.

        DUP: the run is past the commit's offset. GAP: the run has not reached it, or a prune's
        sequence number is known already. FULL: the run has ``cap`` entries in a log, or in its
        output.
        """
        entry = self._fenced(commit.run, by)
        if entry is None:
            return Change(Code.STALE)
        if entry.offset is None or commit.offset > entry.offset:
            return Change(Code.GAP)
        if commit.offset < entry.offset:
            return Change(Code.DUP)
        seqs = entry.run.seqs
        prunes = list(zip(commit.to, commit.prunes, strict=True))
        for to, prune in prunes:
            if prune.seq <= seqs.get((DRAFT, to), 0):
                return Change(Code.GAP)
            if not self._has_room(entry.run, to):
                return Change(Code.FULL)
        if entry.entries >= self.cap:
            return Change(Code.FULL)
        deliveries = []
        for to, prune in prunes:
            seqs[DRAFT, to] = prune.seq
            deliveries.append(self._append(entry.run, to, prune, stamp))
        entry.offset += commit.advance
        entry.emitted = commit.emitted + len(commit.tokens)
        entry.entries += 1
        entry.text_end = commit.finish
        if commit.completes:
            deliveries += self._advance(entry.run, commit.completes, (), stamp)
        return Change(Code.OK, tuple(deliveries))

    # ---- logs ------------------------------------------------------------------------------------

    def trim(self, log: Address, read: Mapping[RunKey, int]) -> None:
        """Note that the reader of ``log`` has removed what it had read there.

        ``read``: of runs, how many entries it has read so far. Ended runs are passed over.
        """
        for run, entries in read.items():
            entry = self._fenced(run)
            if entry is not None:
                entry.run.trimmed[log] = entries

    def _has_room(self, state: _RunState, log: Address) -> bool:
        return state.appended.get(log, 0) - state.trimmed.get(log, 0) < self.cap

    def _append(
        self,
        state: _RunState,
        to: Address,
        envelope: Envelope,
        stamp: Stamp | None = None,
        task: str = "",
    ) -> Delivery:
        state.appended[to] = state.appended.get(to, 0) + 1
        return Delivery(to, envelope, stamp, task)

    def _advance(
        self,
        state: _RunState,
        completed: Sequence[str],
        created: Sequence[Task],
        stamp: Stamp | None,
    ) -> list[Delivery]:
        """Advance a run's graph and deliver the envelopes that it releases."""
        deliveries = []
        for released in state.graph.apply(completed, created, stamp):
            task = released.task
            assert task.envelope is not None and task.to is not None
            numbered = Envelope(GRAPH, state.graph_seqs.next(task.to), task.envelope.message)
            deliveries.append(self._append(state, task.to, numbered, released.stamp, task.name))
        return deliveries
