"""The interfaces of a broker: a worker's link, and the control for everyone else.

The Redis broker and the in-memory broker pass the same tests. Results of scripts are ``Code``s; a
lost broker raises BrokerUnreachable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from flowspec.core.protocol.addresses import SCHEDULER, Address, Role, worker_addresses
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.causes import LOST
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.lease import TERMS
from flowspec.core.protocol.machine import Commit, Complete, Finish, OpenJob, Send
from flowspec.core.protocol.messages import Earlier, Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.committed import committed_ids
from flowspec.core.run.key import RunKey

Rows = npt.NDArray[Any]

#: Most entries of a job that wait in a process's log, and most entries of its output; a job that
#: needs more fails, and no other with it.
LOG_CAP = 50_000
#: Entries of a stream, and bytes of them, that are read before they are removed.
TRIM_ENTRIES = 64
TRIM_BYTES = 1 << 20
#: Most segments whose rows wait for one stage; a job that needs more fails.
ROWS_CAP = 1_000
#: Most steps recorded per process and run; a longer recording is cut off, and its replay reports
#: that.
RECORDING_CAP = 200_000
#: Most jobs in a pipeline's queue.
QUEUE_CAP = 1_000
#: How long the data of an ended job is kept, ms.
RETENTION_MS = 3_600_000
#: How long a job counts as followed after its follower has said so, ms.
FOLLOWED_MS = 10_000
#: How long a spare counts as waiting after it has said so, ms.
SPARE_MS = 3_000

#: Facts of the draft worker's lease: most tokens of a job's prompt and output, whether there is
#: a chat template, and the tokens that end a text.
CONTEXT = "context"
CHAT_TEMPLATE = "chat_template"
ENDS = "ends"
#: Facts of a stage's lease: bytes that it needs, and that were free before it loaded anything.
NEEDS = "needs_bytes"
FREE = "free_bytes"
#: Fact of the scheduler's lease: why the broker takes no writes, one line.
BROKER_FULL = "broker_full"


def full_of(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """Why the broker takes no writes, by the ``workers``' facts, others' data; empty: it does."""
    full = workers.get(role_of(SCHEDULER), {}).get(BROKER_FULL)
    return full if isinstance(full, str) and full.isprintable() else ""


def setup_of(record: Mapping[str, str]) -> str:
    """Digest of a pipeline's record: a worker built from another record must not serve it."""
    return digest_of(record)[:16]


def digest_of(fields: Mapping[str, str]) -> str:
    """Digest of named texts in any order, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()


def middles_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """Folders or hub names of the middle models of a pipeline, the smallest first."""
    return tuple(json.loads(record.get("middles", "[]")))


def drafts_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """Names, in reports, of the drafts that a strategy may choose from; empty in older records."""
    return tuple(json.loads(record.get("drafts", "[]")))


def workers_of(record: Mapping[str, str]) -> tuple[Address, ...]:
    """Every process that works on a pipeline's jobs."""
    return worker_addresses(int(record.get("stages", "0")), len(middles_of(record)))


def roles_of(record: Mapping[str, str]) -> tuple[str, ...]:
    """The lease role of every worker in ``workers_of``, in the same order."""
    return tuple(map(role_of, workers_of(record)))


def role_of(worker: Address) -> str:
    """The lease role of ``worker``, or of the scheduler."""
    if worker.role is Role.DRAFT:
        return "draft"
    if worker.role is Role.SCHEDULER:
        return str(worker)
    return f"{'middle' if worker.role is Role.MIDDLE else 'verify'}-{worker.number}"


def command_of(role: str) -> str:
    """The command that starts the worker of lease ``role``."""
    name, _, number = role.partition("-")
    flags = {"verify": f" --stage {number}", "middle": f" --model {number}"}
    return f"python -m workers.{name}{flags.get(name, '')}"


# ---- what a worker writes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutRows:
    """Rows for ``to``, named by (run, segment); written before the envelope that needs them."""

    to: Address
    run: RunKey
    segment: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class CommitText:
    """A commit and the text that it settles, whole characters only.

    ``lengths``: the characters that each of its tokens adds to the text of the job; of a character
    whose bytes are spread over several tokens the last one adds it, though it may be settled by a
    later one. ``logprobs``: of its tokens, as ``core.run.logprobs`` writes them; empty: not
    asked for.
    """

    commit: Commit
    text: str
    lengths: tuple[int, ...]
    logprobs: str = ""

    @property
    def sizes(self) -> str:
        """``lengths`` as in the job's output: a JSON list."""
        return json.dumps(self.lengths, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a run's recording."""

    run: RunKey
    line: str


Op = PutRows | Send | Bundle | CommitText | Complete | OpenJob | Finish | Record


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of one read: messages in order, and the entries refused as malformed.

    ``stamps``: parallel to ``envelopes`` if any of them has one, else empty. ``unwritten``: earlier
    operations that the broker refused, and why.
    """

    envelopes: tuple[Envelope, ...] = ()
    refused: tuple[str, ...] = ()  # one line each
    stamps: tuple[Stamp | None, ...] = ()
    unwritten: tuple[tuple[Op, Code], ...] = ()


class Link(Protocol):
    """A worker's connection, the only reader of the worker's log, with its own cursor."""

    address: Address

    def read(self, block_seconds: float) -> ReadResult:
        """What has arrived since the last read; blocks up to ``block_seconds`` if nothing has."""
        ...

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        """Remove and return a segment's rows; GapError if they have not arrived."""
        ...

    def drop_rows(self, run: RunKey, segment: int) -> None:
        """Drop the rows of a segment, which will not be computed."""
        ...

    def write(self, ops: Sequence[Op]) -> list[Code]:
        """Carry out ``ops`` in order; one code per operation, of a bundle one per message.

        A link may write without waiting: the code is then OK, and a refusal comes with a later
        read, in ``ReadResult.unwritten``.
        """
        ...

    def forget(self, run: RunKey) -> None:
        """Note that the run has ended here: what arrives of it from now on is dropped."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


# ---- clients and scheduler -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Intake:
    """A submission: the job's id, and its fields, or the error in reading them."""

    job: str
    fields: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """An entry of a job's output. ``cursor``: where to continue reading after it."""

    cursor: str
    fields: Mapping[str, str]


class Claim(NamedTuple):
    """A lease in force: the holder's token, its facts, and the generation of its role."""

    token: str
    facts: dict[str, Any]
    generation: int


def earlier_of(job: str, known: Mapping[str, str], output: Sequence[OutputEntry]) -> Earlier | None:
    """What the runs of ``job`` have left; None: it was never opened.

    ``known``: its stored facts. StateError if its output cannot be read.
    """
    if "prompt_token_ids" not in known:
        return None
    prompt = tuple(json.loads(known["prompt_token_ids"]))
    commits = [entry for entry in output if entry.fields.get("kind") == "tokens"]
    groups = tuple(committed_ids(job, entry.fields) for entry in commits)
    first = (_milliseconds(commits[0].cursor) - _milliseconds(job)) / 1e3 if commits else 0.0
    return Earlier(prompt, groups, max(0.0, first))


def _milliseconds(entry: str) -> int:
    """When a stream's entry was made."""
    return int(entry.partition("-")[0])


class Control(Protocol):
    """Jobs, leases and the pipeline's record.

    ``by``: the generation of the scheduler that decides, which has no effect if another one has
    taken the role since; None: somebody else decides.
    """

    def join_intake(self) -> None:
        """Join the readers of submissions; call once, before the first read."""
        ...

    def read_intake(self, block_seconds: float) -> list[Intake]:
        """Submissions read before and not acknowledged; if there are none, new ones."""
        ...

    def acknowledge(self, jobs: Sequence[str]) -> None:
        """Mark submissions as handled."""
        ...

    def admit(
        self, job: str, fields: Mapping[str, str], error: str = "", *, most: int | None = None
    ) -> Code:
        """Put a submission into the queue, or end it with ``error``; idempotent.

        FULL: ``most`` jobs (None: QUEUE_CAP) wait already; the submission ends with an error.
        """
        ...

    def queued(self) -> list[str]:
        """Waiting jobs, oldest first."""
        ...

    def running(self) -> list[str]:
        """Jobs assigned and not ended."""
        ...

    def job(self, job: str) -> dict[str, str]:
        """The stored facts of a job; empty if it is unknown."""
        ...

    def assign(
        self, job: str, most: int, holders: Mapping[str, int], by: int | None = None
    ) -> Code:
        """Assign a waiting job to the workers ``holders``, unless ``most`` jobs run already.

        ``holders``: generations by role, in the pipeline's order. STALE: one of them is not the
        latest to have claimed its role.
        """
        ...

    def holders(self, job: str) -> dict[str, int]:
        """The generations by role of the workers that a job was assigned to."""
        ...

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
        """End a job from outside; ``cause``: of the error, LOST or LATE.

        ``lost``: the worker for whose loss it ends. STALE: that one is there. ``again``: how many
        times a running job is put back in front of the queue before that.
        """
        ...

    def claim(
        self,
        role: str,
        token: str,
        info: Mapping[str, object],
        lifetime_ms: int = TERMS.shortest_ms,
    ) -> int:
        """Take or renew the lease on ``role``; its generation, or 0 if another token holds it.

        A claim raises the role's generation, unless ``token`` was the last to claim it: a late
        renewal keeps it, as long as nobody else has come meanwhile.
        """
        ...

    def release(self, role: str, token: str, *, leaves: bool = False) -> None:
        """Release the lease on ``role`` if ``token`` holds it.

        ``leaves``: on purpose, so that its jobs go on elsewhere as if they had not lost a worker.
        """
        ...

    def claims(self) -> dict[str, Claim]:
        """Leases in force, by role."""
        ...

    def set_pipeline(self, record: Mapping[str, str], by: int | None = None) -> Code:
        """Store the pipeline's record, in place of whatever is there; STALE as of ``by``."""
        ...

    def pipeline(self) -> dict[str, str]:
        """The pipeline's record; empty before a scheduler has stored it."""
        ...

    def place(self, job: str) -> Code:
        """Put ``job`` back where its record says that it waits or runs, if it is not there.

        OK; DUP: it is there; STALE: it has ended, or has no record.
        """
        ...

    def drop_mistyped(self) -> bool:
        """Delete the pipeline's keys that hold another type than theirs, which end every reader.

        Those that are always there, and those of running jobs. Whether there were any.
        """
        ...

    def check_writes(self) -> None:
        """BrokerFull if the broker takes no writes, and goes on refusing them."""
        ...

    def eviction(self) -> str:
        """The policy by which a full broker deletes keys; empty: it deletes none."""
        ...

    def unfollowed(self) -> list[str]:
        """Jobs that are to end with their follower, who has not said in time that it waits.

        Those that have ended are forgotten, and those that are not taken in yet are left out.
        """
        ...

    def wait_for_change(self, block_seconds: float) -> None:
        """Block until a job is admitted or ends, at most ``block_seconds``.

        Returns at once if that happened since the last call.
        """
        ...

    def close(self) -> None:
        """Close the connections."""
        ...
