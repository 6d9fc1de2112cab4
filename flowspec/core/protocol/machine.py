"""The seam between machines and whatever drives them.

A machine is driven by ``step(input, now) -> outputs``; ``now`` is in seconds on any clock that
does not run backwards. A driver feeds what arrived (``Received``), asks for work when its
executor is free and its log is drained (``Poll``), performs ``Run`` outputs and feeds their
results back (``Done``), and calls ``step(Tick(), now)`` once ``machine.deadline`` has passed.
Live, replay and simulation are three drivers of the same machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowspec.core.protocol.messages import Envelope, Returns
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.slots import Moves


@dataclass(frozen=True, slots=True)
class Part:
    """One job's rows of a pass. ``tokens`` is empty where the input rows travel beside the segment;
    then ``offsets`` says which of the segment's rows are left.

    ``context``, ``held``, ``moves`` and ``parents`` are a ``slots.Plan``: first carry out
    ``moves``, then the ``held`` rows stay and the new ones follow. ``answers``: offsets of the
    rows the executor must answer for (a target's choice, a drafter's proposals).
    """

    job: str
    epoch: int
    segment: int
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    context: int
    held: int
    moves: Moves | None
    parents: tuple[int, ...]
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a stage over rows of one or several jobs."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The target's answers for ``Part.answers``, parallel to them; see ``messages.Result``."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PassDone:
    """Parallel to ``Pass.parts``. The rows computed stay with the driver."""

    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """One forward pass of the drafter; the best ``width`` continuations of every answered row.

    ``growth_pass`` counts the passes of one growth from 0: a cost model may charge a growth
    once. ``parents``: ids of the rows' parents, parallel to ``part.ids``; -1: none. ``coupled``:
    rank by ``log softmax(logits / T) + noise`` of the job's keyed draw (``algorithms.md`` 7).
    ``drafter``: whose pass it is.
    """

    part: Part
    width: int
    growth_pass: int = 0
    parents: tuple[int, ...] = ()
    coupled: bool = False
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class DraftDone:
    """Per answered row: token ids best first, distinct, and their values.

    A value is the log of the expected acceptance, at most 0; in a coupled draft the candidate's
    perturbed score less the best one's. ``sources`` is empty or says which of a hybrid's
    drafters proposed each candidate. Values of both kinds are calibrated by the session
    (``core.calibrate``).
    """

    tokens: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]
    sources: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn a job's prompt text into token ids."""

    job: str
    prompt: str
    raw: bool


@dataclass(frozen=True, slots=True)
class EncodeDone:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The executor could not do the work; ``reason`` is one line."""

    reason: str


Work = Pass | Draft | Encode
WorkResult = PassDone | DraftDone | EncodeDone | WorkFailed


@dataclass(frozen=True, slots=True)
class Received:
    """Everything one read returned, in order."""

    envelopes: tuple[Envelope, ...]


@dataclass(frozen=True, slots=True)
class Poll:
    """The executor is free and nothing more is waiting to be read: start work if there is some."""


@dataclass(frozen=True, slots=True)
class Done:
    """The running work has ended."""

    result: WorkResult


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker did not take what was written for a job. ``stale``: the job is somebody else's
    now.
    """

    job: str
    epoch: int
    stale: bool
    reason: str


Input = Received | Poll | Done | Tick | Refused


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the pass just done that travel with a segment: offsets into part ``part``."""

    part: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver ``envelope`` to ``to``: at once, or as task ``task`` of the graph once ``after`` are
    complete.

    ``completes``: tasks complete at the same moment.
    """

    to: str
    envelope: Envelope
    rows: Rows | None = None
    task: str = ""
    after: tuple[str, ...] = ()
    completes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Move the job forward, all or nothing: append ``tokens`` to its output, advance the offset by
    the accepted rows, put ``prunes`` (one per stage, parallel to ``to``) into the logs, complete
    tasks.

    ``offset``: context length before it. ``emitted``: output tokens before it.
    """

    job: str
    epoch: int
    offset: int
    emitted: int
    advance: int
    tokens: tuple[int, ...]
    finish: str
    to: tuple[str, ...]
    prunes: tuple[Envelope, ...]
    completes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Complete:
    """Complete tasks of the graph without sending anything."""

    job: str
    epoch: int
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over. ``reason``: eos, length, cancelled or error; ``error``: one line, if so."""

    job: str
    epoch: int
    reason: str
    error: str
    stats: dict[str, object]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job's prompt is known and will be served: tell whoever asks."""

    job: str
    epoch: int
    prompt_ids: tuple[int, ...]
    strategy: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make room for a job's rows before its first pass."""

    job: str
    epoch: int
    capacity: int
    sampling: Sampling
    returns: Returns


@dataclass(frozen=True, slots=True)
class Release:
    """Free a job's rows."""

    job: str


@dataclass(frozen=True, slots=True)
class Discard:
    """The rows that came with a segment are not needed: all of them were pruned."""

    job: str
    segment: int


@dataclass(frozen=True, slots=True)
class Learn:
    """Give the drafter the target's hidden rows that came with an answer, one per id."""

    job: str
    epoch: int
    segment: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Compute; the machine asks for nothing else until ``Done``."""

    work: Work


Output = Send | Commit | Complete | Finish | Accepted | Allocate | Release | Discard | Learn | Run


class Machine(Protocol):
    """What a driver can drive."""

    @property
    def runnable(self) -> bool:
        """``Poll`` would start work."""
        ...

    @property
    def continuing(self) -> bool:
        """``Poll`` would carry on with what has just ended: the next pass of the same growth."""
        ...

    @property
    def deadline(self) -> float | None:
        """When ``Tick`` is due, on the clock of ``now``; None: never."""
        ...

    def step(self, event: Input, now: float) -> Sequence[Output]:
        """Take one input; never blocks, never raises for what a peer sent."""
        ...
