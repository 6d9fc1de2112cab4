"""The interface between machines and their drivers.

A driver calls ``step(input, now) -> outputs``; ``now`` is in seconds on any monotonic clock. The
driver passes on what arrived (``Received``), polls for work when its executor is free and its log
is drained (``Poll``), performs ``Compute`` outputs and returns their results (``Done``), and calls
``step(Tick(), now)`` once ``machine.deadline`` has passed. All drivers, live or simulated, run the
same machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.causes import FAILED
from flowspec.core.protocol.messages import Envelope, Message, Returns
from flowspec.core.protocol.work import Kept, Work, WorkResult
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.share import RunShare

# ---- inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """All envelopes that one read returned, in order."""

    envelopes: tuple[Envelope, ...]


@dataclass(frozen=True, slots=True)
class Poll:
    """The executor is free and the log is drained: start work if there is any."""


@dataclass(frozen=True, slots=True)
class Done:
    """The running work has ended: a pass, or by the kind of its result the encoding of a prompt."""

    result: WorkResult


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused a write for a run, or an output of it could not be carried out.

    ``stale``: the run is over. ``is_commit``: the write was a commit, so its tokens are not in the
    output. ``is_keep``: rows could not be kept; the run itself goes on.
    """

    run: RunKey
    stale: bool
    reason: str
    is_commit: bool = False
    is_keep: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """What ``run`` may use beside other runs, from now on.

    As an output it says what the draft worker has granted, and needs no performing. In the run's
    recording it is an input: what it follows from, the other runs, is not there.
    """

    run: RunKey
    share: RunShare


Input = Received | Poll | Done | Tick | Refused | Granted

# ---- outputs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of the last pass that travel with a segment: offsets into its part ``part``."""

    part: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver ``envelope`` to ``to``, at once or as a task of the graph.

    ``task``: the graph task, released once ``after`` are complete; empty: deliver at once.
    ``completes``: tasks that the same write completes.
    """

    to: Address
    envelope: Envelope
    rows: PassRows | None = None
    task: str = ""
    after: tuple[str, ...] = ()
    completes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Move a run forward by a verdict, all or nothing.

    Appends ``tokens`` to the job's output, advances the offset by ``advance``, the number of
    accepted rows, puts ``prunes`` (one per stage, parallel to ``to``) into the logs, completes
    tasks. ``offset``: context length before the commit. ``emitted``: output tokens before it.
    """

    run: RunKey
    offset: int
    emitted: int
    advance: int
    tokens: tuple[int, ...]
    finish: str
    to: tuple[Address, ...]
    prunes: tuple[Envelope, ...]
    completes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredCommit(Commit):
    """A commit of a job that asked for the log-probabilities of ``alternatives`` tokens.

    ``top``: for each of ``tokens`` the pairs of its row, as in ``messages.Answer``.
    """

    alternatives: int = 0
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Complete:
    """Complete tasks of the graph without sending anything."""

    run: RunKey
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job. ``reason``: eos, length, cancelled or error; ``error``: one line, or empty.

    ``cause``: of the error, one of ``causes``.
    """

    run: RunKey
    reason: str
    error: str
    stats: dict[str, object]
    cause: str = FAILED


@dataclass(frozen=True, slots=True)
class OpenJob:
    """The job's prompt is known and will be served: publish it and open the job."""

    run: RunKey
    prompt_ids: tuple[int, ...]
    strategy: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make room for at most ``capacity`` rows of a run, before its first pass.

    Room that the run had before is given up. ``source``: the kept run with whose first rows it
    begins, as many of each cache as ``held`` says: a stage has one, the draft worker one a drafter.
    ``prompt``: what the text continues, for the draft worker, and ``committed``: output of earlier
    runs of the job by commit, behind which it goes on.
    """

    run: RunKey
    capacity: int
    sampling: Sampling
    returns: Returns
    source: RunKey | None = None
    held: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    committed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """Free a run's rows."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep rows of a run, which ends, for runs that begin as it does.

    ``caches``: as ``Allocate.held``. Refused if that fails: they are not kept then.
    """

    run: RunKey
    caches: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the kept rows of ``run``."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the rows that came with a segment: none of them will be computed."""

    run: RunKey
    segment: int


@dataclass(frozen=True, slots=True)
class Learn:
    """Give the drafter the target's hidden rows that came with an answer, one per id."""

    run: RunKey
    segment: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute ``work``; until ``Done`` the machine requests no other pass, or no other encoding."""

    work: Work


Output = (
    Send
    | Commit
    | Complete
    | Finish
    | OpenJob
    | Allocate
    | Release
    | Keep
    | Evict
    | Discard
    | Learn
    | Compute
    | Granted
)


class Machine(Protocol):
    """A machine, as its driver sees it."""

    @property
    def runnable(self) -> bool:
        """Whether ``Poll`` would do something, usually start work."""
        ...

    @property
    def continuing(self) -> bool:
        """Whether ``Poll`` would start the next pass of the growth whose pass has just ended."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it has no run: nothing is lost if its worker leaves."""
        ...

    def serves(self, message: Message) -> bool:
        """Whether the run that ``message`` begins, if it begins one, is assigned to this holder."""
        ...

    @property
    def deadline(self) -> float | None:
        """When ``Tick`` is due, on the clock of ``now``; None: never."""
        ...

    def step(self, event: Input, now: float) -> Sequence[Output]:
        """Take one input; never blocks, and never raises because of a peer's message."""
        ...
