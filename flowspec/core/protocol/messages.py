"""The messages between processes, one frozen dataclass each.

Every message names its run. Rows of hidden states are not part of a message: a segment's rows
travel beside it, named by (run, segment).
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol.addresses import Address
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ProtocolError

#: Longest reason of a ``Fault``, characters.
MOST_REASON = 1000


@dataclass(frozen=True, slots=True)
class Hop:
    """A task of the graph and the tasks that must be complete before its envelope is delivered."""

    task: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Returns:
    """What a job needs per verified row besides the target's token."""

    #: Number of best (id, log-probability) pairs; the chosen token's is added if it is not among
    #: them.
    top: int = 0
    #: A row for the drafter beside the answer: the one after the final norm, or a sum of taps.
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first ``rows`` kept rows of the run ``run`` (``core.prefixes.kept_prefixes``)."""

    run: RunKey
    rows: int


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier runs of a job have left: its run goes on behind it.

    ``prompt_ids``: as the job was opened with. ``committed``: output tokens, by commit.
    ``first_token_seconds``: from the job's submission to the first of them, on the broker's clock.
    """

    prompt_ids: tuple[int, ...]
    committed: tuple[tuple[int, ...], ...] = ()
    first_token_seconds: float = 0.0

    @property
    def output(self) -> tuple[int, ...]:
        """The committed tokens."""
        return tuple(token for group in self.committed for token in group)


@dataclass(frozen=True, slots=True)
class Submit:
    """Scheduler to draft worker: start this run. ``fields``: the job's, as submitted.

    ``queued_seconds``: time since the job was submitted, on the broker's clock. ``generations``: of
    the workers that it is assigned to (``holders``). ``earlier``: None: no run was opened before.
    """

    run: RunKey
    fields: tuple[tuple[str, str], ...]
    queued_seconds: float = 0.0
    generations: tuple[int, ...] = ()
    earlier: Earlier | None = None


@dataclass(frozen=True, slots=True)
class Open:
    """Draft worker to every stage: a run begins. ``capacity``: most KV rows it will hold.

    ``record``: keep a recording of it. ``prefix``: the rows it begins with; None: all are sent. A
    stage that does not hold them sends ``PrefixLost``, and drops the run's rows until the prompt's
    first one comes. A run whose prompt comes from its first row again begins anew.
    ``generations``: as in ``Submit``; a stage under another generation than its own there ignores
    the run.
    """

    run: RunKey
    prompt_length: int
    capacity: int
    sampling: Sampling
    returns: Returns = Returns()
    record: bool = False
    prefix: Prefix | None = None
    generations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        held = self.prefix.rows if self.prefix is not None else 0
        if self.prompt_length < 0 or self.capacity < 0 or held < 0:
            raise ProtocolError("a run is opened with a negative number of rows")


@dataclass(frozen=True, slots=True)
class PrefixLost:
    """Stage to draft worker: it does not hold the rows that the run was to begin with."""

    run: RunKey
    stage: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows to compute, parents before children; columns are parallel.

    ``tokens``: for the first stage only; the others take their input rows by (run, segment).
    ``marker``: forward it even if no rows are left (the papers' lockstep). ``task``: completed by
    the pass. ``route``: the remaining hops. ``seconds``: its slowest pass so far. ``rows``: of that
    pass, other runs' included. ``together``: most rows of a pass that it shares with other runs;
    0: no limit.
    """

    run: RunKey
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
    rows: int = 0
    together: int = 0

    def __post_init__(self) -> None:
        rows = len(self.ids)
        columns_match = len(self.parents) == len(self.positions) == rows
        if not columns_match or len(self.tokens) not in (0, rows):
            raise ProtocolError(f"the columns of segment {self.segment} differ in length")


@dataclass(frozen=True, slots=True)
class Prune:
    """A commit's message to every stage: ``accepted`` rows become context, ``root`` the root.

    ``offset``: context length before it. ``retained``: ids of the nodes that are still live, a
    check of the rows that a stage keeps. Idempotent: a stage past ``offset`` ignores it.
    """

    run: RunKey
    offset: int
    accepted: tuple[int, ...]
    root: int
    retained: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Last stage or middle model to draft worker: its choice for each live row of a segment.

    ``top``: per row the best (id, log-probability) pairs of the unprocessed distribution, then the
    chosen token's if it is not among them; empty unless requested. ``seconds``: the slowest pass of
    any stage over the segment, which is the cost of a pipeline step over ``rows`` rows, other runs'
    included.
    """

    run: RunKey
    segment: int
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    seconds: float = 0.0
    rows: int = 0

    def __post_init__(self) -> None:
        rows = len(self.ids)
        if len(self.tokens) != rows or len(self.top) not in (0, rows):
            raise ProtocolError(
                f"the columns of the answer to segment {self.segment} differ in length"
            )


@dataclass(frozen=True, slots=True)
class Close:
    """Draft worker to every stage: the run is over, free its rows and report.

    ``keep``: its first rows to keep for later runs; 0: none. ``kept``: with ``keep``, all runs of
    which rows are kept from now on; others are dropped.
    """

    run: RunKey
    keep: int = 0
    kept: tuple[RunKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Retain:
    """Draft worker to every stage: keep the first ``keep`` rows of a run that goes on.

    They are rows of its prompt, which the stage has computed. ``kept``: as in ``Close``.
    """

    run: RunKey
    keep: int
    kept: tuple[RunKey, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Scheduler to every worker: drop all runs of the job that are earlier than ``run``."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class Meter:
    """A stage's work for one run.

    ``useful`` rows were accepted, ``wasted`` ones computed and then pruned, ``void`` ones dropped
    before they were computed. Prompt rows count in ``prompt`` alone.
    """

    prompt: int = 0
    useful: int = 0
    wasted: int = 0
    void: int = 0
    passes: int = 0
    busy_seconds: float = 0.0  # decode passes, prefill excluded


@dataclass(frozen=True, slots=True)
class StageReport:
    """Stage to draft worker, in reply to ``Close``."""

    run: RunKey
    stage: int
    meter: Meter


@dataclass(frozen=True, slots=True)
class Fault:
    """Stage to draft worker: the run has failed. ``reason``: one line for the user, cut if long."""

    run: RunKey
    reason: str


@dataclass(frozen=True, slots=True)
class Synced:
    """Delivered by the graph when every task of a join is complete."""

    run: RunKey
    task: str


Message = (
    Submit
    | Open
    | Segment
    | Prune
    | Answer
    | Close
    | Revoke
    | StageReport
    | Fault
    | Synced
    | PrefixLost
    | Retain
)
#: In the order of their numbers on the wire.
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
    PrefixLost,
    Retain,
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender. ``seq`` counts from 1 per (run, sender, receiver).

    An envelope given to the graph has sender ``GRAPH``, and seq 0 until the graph releases it.
    ``bundle``: the receiver's number of the entry in which it came with other runs' messages
    (``bundles``); 0: it came alone, or has not come yet.
    """

    sender: Address
    seq: int
    message: Message
    bundle: int = 0
