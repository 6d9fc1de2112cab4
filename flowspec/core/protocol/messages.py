"""What travels between processes: one small frozen dataclass a message.

Every message names its job and the epoch (ownership fence) it belongs to; readers drop other
epochs. Rows of hidden states are not in here: a segment's rows travel beside it under its name.

Senders and receivers are nodes: ``d0`` the draft worker, ``s1`` .. ``sN`` the verify stages,
``scheduler`` the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ProtocolError

DRAFT = "d0"
SCHEDULER = "scheduler"
#: Sender of envelopes the task graph held back; it numbers them as it lets them go.
GRAPH = "graph"


def stage_node(stage: int) -> str:
    """Node name of verify stage ``stage``, counted from 1."""
    return f"s{stage}"


def middle_node(model: int) -> str:
    """Node name of middle model ``model``, counted from 1, between the drafter and the target."""
    return f"m{model}"


def worker_nodes(stages: int, middles: int) -> tuple[str, ...]:
    """Every node of a pipeline that works on jobs: draft worker, verify stages, middle models."""
    return (DRAFT, *map(stage_node, range(1, stages + 1)), *map(middle_node, range(1, middles + 1)))


@dataclass(frozen=True, slots=True)
class Hop:
    """A task of the graph and the tasks that must be complete before its envelope is delivered."""

    task: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Returns:
    """What a job wants back for each verified row, beside the target's token."""

    logprob: bool = False
    top: int = 0  # this many best (id, log-probability) pairs
    hidden: bool = False  # the row after the final norm, float32, beside the answer


@dataclass(frozen=True, slots=True)
class Submit:
    """Scheduler to draft worker: this job is yours from now on. ``fields`` are as submitted."""

    job: str
    epoch: int
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Draft worker to every stage: a job begins. ``capacity``: KV rows it will never exceed.

    ``record``: keep a recording of what is done for it.
    """

    job: str
    epoch: int
    prompt_length: int
    capacity: int
    sampling: Sampling
    returns: Returns = Returns()
    record: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to compute, parents before children; columns are parallel.

    ``tokens`` only reach the first stage; the others find their input rows under (job, epoch,
    segment). ``marker``: forward it even if nothing is left of it (the papers' lockstep).
    ``task`` is completed by the pass, ``route`` holds the hops still ahead. ``seconds``: its
    slowest pass so far.
    """

    job: str
    epoch: int
    segment: int
    round: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    marker: bool = False
    task: str = ""
    route: tuple[Hop, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        rows = len(self.ids)
        if not len(self.parents) == len(self.positions) == rows or len(self.tokens) not in (
            0,
            rows,
        ):
            raise ProtocolError(f"the columns of segment {self.segment} differ in length")


@dataclass(frozen=True, slots=True)
class Prune:
    """Put into every stage's log by a commit: ``accepted`` rows become context, ``root`` is the
    root.

    ``offset``: context length before it. ``retained``: ids below the new root that were sent and
    live, a check against what a stage keeps. Idempotent: a stage past ``offset`` ignores it.
    """

    job: str
    epoch: int
    offset: int
    accepted: tuple[int, ...]
    root: int
    retained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Last stage to draft worker: the target's choice for every row of a segment that was left.

    ``logprobs`` and ``top`` are empty unless the job asked: per row the choice's
    log-probability, and the best (id, log-probability) pairs, of the unprocessed distribution.
    ``seconds``: the slowest pass any stage made over the segment, what a step of the pipeline
    costs with so many rows.
    """

    job: str
    epoch: int
    segment: int
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        rows = len(self.ids)
        if len(self.tokens) != rows or {len(self.logprobs), len(self.top)} - {0, rows}:
            raise ProtocolError(
                f"the columns of the answer to segment {self.segment} differ in length"
            )


@dataclass(frozen=True, slots=True)
class Close:
    """Draft worker to every stage: the job is over, free its rows and report."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Scheduler to everyone: whoever holds the job below ``epoch`` drops it now."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Meter:
    """A stage's work for one job. Rows by fate: ``useful`` were committed, ``wasted`` computed and
    then pruned, ``void`` dropped before computing. Prompt rows are counted in ``prompt`` alone.
    """

    prompt: int = 0
    useful: int = 0
    wasted: int = 0
    void: int = 0
    passes: int = 0
    busy_seconds: float = 0.0  # decode passes, prefill excluded


@dataclass(frozen=True, slots=True)
class StageReport:
    """Stage to draft worker, answering ``Close``."""

    job: str
    epoch: int
    stage: int
    meter: Meter


@dataclass(frozen=True, slots=True)
class Fault:
    """Anyone to the draft worker: the job cannot go on. ``reason`` is one line for the user."""

    job: str
    epoch: int
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Synced:
    """Delivered by the graph when every task of a join is complete."""

    job: str
    epoch: int
    task: str


Message = Submit | Open | Segment | Prune | Answer | Close | Revoke | StageReport | Fault | Synced
MESSAGES: tuple[type[Message], ...] = (
    Submit,
    Open,
    Segment,
    Prune,
    Answer,
    Close,
    Revoke,
    StageReport,
    Fault,
    Synced,
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as a node receives it. ``seq`` counts from 1 per (job, epoch, sender, receiver).

    An envelope given to the graph has sender ``graph`` and seq 0 until the graph lets it go.
    """

    sender: str
    seq: int
    message: Message


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work in the graph: PipeDec's tuple plus the job (``algorithms.md`` 3.6).

    ``envelope`` goes to ``to`` once every task in ``after`` is complete. A task without one is
    virtual: it is complete as soon as its dependencies are.
    """

    job: str
    name: str
    after: tuple[str, ...] = ()
    to: str = ""
    envelope: Envelope | None = field(default=None)
