"""Ledgers in known states, and changes to make to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.ledger import JobState, Ledger
from flowspec.core.protocol.machine import Commit, OpenJob, Send
from flowspec.core.protocol.messages import Close, Envelope, Prune, Synced
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1, S2

MANY = 99
WORKERS = (D0, S1, S2)
JOB = "1-0"
FIRST = RunKey(JOB, 1)
SECOND = RunKey(JOB, 2)
PROMPT = (5, 6, 7)
CONTEXT = len(PROMPT) - 1
FIELDS = {"prompt_ids": "[5, 6, 7]", "strategy": "flowspec"}


def picture(value: object) -> object:
    """The state of ``value`` as comparable values."""
    if isinstance(value, Mapping):
        return {key: picture(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [picture(inner) for inner in value]
    if isinstance(value, Set):
        return set(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {one.name: picture(getattr(value, one.name)) for one in fields}
    return picture(vars(value)) if isinstance(value, Ledger | TaskGraph | SeqWriter) else value


def send(
    run: RunKey, seq: int, sender: Address = D0, to: Address = S1, completes: Sequence[str] = ()
) -> Send:
    return Send(to, Envelope(sender, seq, Close(run)), completes=tuple(completes))


def held(
    run: RunKey, task: str, *after: str, to: Address = S1, completes: Sequence[str] = ()
) -> Send:
    """A message sent as a task of the graph."""
    envelope = Envelope(GRAPH, 0, Synced(run, task))
    return Send(to, envelope, task=task, after=after, completes=tuple(completes))


def commit(
    run: RunKey,
    offset: int = CONTEXT,
    *seqs: int,
    emitted: int = 0,
    advance: int = 1,
    tokens: Sequence[int] = (9,),
    completes: Sequence[str] = (),
) -> Commit:
    """A commit with a prune for S1 and S2 with sequence numbers ``seqs``."""
    prune = Prune(run, offset, (), 0, ())
    return Commit(
        run=run,
        offset=offset,
        emitted=emitted,
        advance=advance,
        tokens=tuple(tokens),
        finish="",
        to=(S1, S2)[: len(seqs)],
        prunes=tuple(Envelope(D0, seq, prune) for seq in seqs),
        completes=tuple(completes),
    )


def accepted(run: RunKey) -> OpenJob:
    return OpenJob(run, PROMPT, "flowspec")


def queued(cap: int = MANY) -> Ledger:
    ledger = Ledger(cap)
    ledger.admit(JOB, FIELDS, MANY)
    return ledger


def running(cap: int = MANY) -> Ledger:
    """A ledger whose only job is open in its first run."""
    ledger = queued(cap)
    ledger.assign(JOB, MANY)
    ledger.open(accepted(FIRST))
    return ledger


def put_back(ledger: Ledger, job: str = JOB) -> None:
    """Queue ``job`` again, behind all others: its next ``assign`` is a second run."""
    ledger.jobs[job].state = JobState.QUEUED
    ledger.queue.append(job)
