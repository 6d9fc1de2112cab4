"""What a broker is to the rest: a worker's link, and the control everyone else uses.

``redis.py`` and ``memory.py`` are two brokers held to one suite of tests. Script codes come back as
``Code``; the broker being gone is raised as BrokerUnreachable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Accepted, Commit, Complete, Finish, Send
from flowspec.core.protocol.messages import Envelope, worker_nodes
from flowspec.core.protocol.stamps import Stamp

Rows = npt.NDArray[Any]

#: Entries a node's log, or a job's output, may hold before the job fails.
LOG_CAP = 50_000
#: Segments' rows that may wait for one stage before the job fails.
ROWS_CAP = 1_000
#: Recorded steps one node keeps of one job; a recording that reached it is cut, and its replay says
#: so.
RECORDING_CAP = 200_000
#: Jobs that may wait in a pipeline's queue.
QUEUE_CAP = 1_000
#: What an ended job leaves behind lives for so long, ms.
RETENTION_MS = 3_600_000
#: A lease not renewed for so long is free, ms.
LEASE_MS = 5_000
#: A lease is renewed this often, seconds.
RENEW_SECONDS = 1.0


def setup_of(record: Mapping[str, str]) -> str:
    """Digest of a pipeline's record: a worker built from another one must not serve it."""
    return hashlib.sha256(json.dumps(dict(record), sort_keys=True).encode()).hexdigest()[:16]


def middles_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """Folders or hub names of the middle models of a pipeline, the smallest first."""
    return tuple(json.loads(record.get("middles", "[]")))


def drafts_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """What reports call the drafts a strategy may choose from; none in the record of an older
    pipeline.
    """
    return tuple(json.loads(record.get("drafts", "[]")))


def nodes_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """Every node that works on a pipeline's jobs."""
    return worker_nodes(int(record.get("stages", "0")), len(middles_of(record)))


def roles_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """The lease of every worker in ``nodes_of``."""
    verify = (f"verify-{stage}" for stage in range(1, int(record.get("stages", "0")) + 1))
    return (
        "draft",
        *verify,
        *(f"middle-{model}" for model in range(1, len(middles_of(record)) + 1)),
    )


# ---- what a worker writes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutRows:
    """Rows for ``to``, named by (job, epoch, segment); written before the envelope
    that needs them.
    """

    to: str
    job: str
    epoch: int
    segment: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class CommitText:
    """A commit and the text of its tokens, whole characters only."""

    commit: Commit
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a job's recording."""

    job: str
    line: str


Op = PutRows | Send | CommitText | Complete | Accepted | Finish | Record


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one read returned: messages in order, and how many entries were refused as malformed.

    ``stamps``: parallel to ``envelopes`` if any of them has one, else empty.
    """

    envelopes: tuple[Envelope, ...] = ()
    refused: tuple[str, ...] = ()  # one line each
    stamps: tuple[Stamp | None, ...] = ()


class Link(Protocol):
    """One node's connection: it alone reads the node's log, with its own cursor."""

    node: str

    def read(self, block_seconds: float) -> Delivery:
        """What has arrived since the last read; waits up to ``block_seconds`` for something."""
        ...

    def take_rows(self, job: str, epoch: int, segment: int) -> Rows:
        """The rows that came for a segment, once; GapError if they are not there within a bounded
        wait.
        """
        ...

    def drop_rows(self, job: str, segment: int) -> None:
        """Forget rows nobody will compute."""
        ...

    def write(self, ops: Sequence[Op], at: float | None = None) -> list[Code]:
        """Carry out ``ops`` in order, in one round trip; a code for each.

        ``at``: the nominal time of an emulated run; messages and commits are stamped with it.
        """
        ...

    def forget(self, job: str) -> None:
        """The job has ended here: its part of the log may be trimmed."""
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


# ---- what everyone else does ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intake:
    """One submission: the job's id, and its fields, or why they cannot be read."""

    job: str
    fields: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """One entry of a job's output; ``cursor`` names it to a reader that goes on behind it."""

    cursor: str
    fields: Mapping[str, str]


class Control(Protocol):
    """Jobs, leases and the pipeline's record."""

    def submit(self, fields: Mapping[str, str]) -> str:
        """Put a job into the intake; its id."""
        ...

    def join_intake(self) -> None:
        """Take part in reading submissions; once, before the first read."""
        ...

    def read_intake(self, block_seconds: float) -> list[Intake]:
        """New submissions, and those read before and not acknowledged."""
        ...

    def acknowledge(self, jobs: Sequence[str]) -> None:
        """These submissions were dealt with."""
        ...

    def admit(self, job: str, fields: Mapping[str, str], error: str = "") -> Code:
        """Take a submission into the queue, or answer it with ``error``. Repeatable."""
        ...

    def queued(self) -> list[str]:
        """Waiting jobs, oldest first."""
        ...

    def running(self) -> list[str]:
        """Jobs assigned and not ended."""
        ...

    def job(self, job: str) -> dict[str, str]:
        """What is known of a job; empty if nothing is."""
        ...

    def assign(self, job: str, most: int, owners: Mapping[str, str]) -> Code:
        """Give the queue's first job to the draft worker, unless ``most`` jobs run already.

        ``owners``: the lease's token of every worker that serves it, by role.
        """
        ...

    def owners(self, job: str) -> dict[str, str]:
        """The owners a job was assigned with."""
        ...

    def revoke(self, job: str, reason: str, error: str = "") -> Code:
        """End a job from outside."""
        ...

    def read_output(self, job: str, cursor: str, block_seconds: float) -> list[OutputEntry]:
        """Entries of a job's output behind ``cursor`` (``0``: from the start)."""
        ...

    def read_recording(self, job: str) -> list[str]:
        """The lines of a job's recording."""
        ...

    def claim(self, role: str, token: str, info: Mapping[str, object]) -> bool:
        """Take or renew the lease on ``role``; False if another token holds it."""
        ...

    def release(self, role: str, token: str) -> None:
        """Give up the lease on ``role`` if it is ours."""
        ...

    def claims(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Leases in force: token and info by role."""
        ...

    def set_pipeline(self, record: Mapping[str, str]) -> None:
        """Say what the pipeline runs."""
        ...

    def pipeline(self) -> dict[str, str]:
        """What the pipeline runs; empty before a scheduler said so."""
        ...

    def wait_for_change(self, block_seconds: float) -> None:
        """Return when a job ended, or after ``block_seconds``."""
        ...

    def close(self) -> None:
        """Give the connections back."""
        ...
