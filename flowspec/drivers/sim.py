"""Machines under a virtual clock: an event heap, costs as functions, results computed on the spot.

The simulation is the broker too: one task graph a job, the output, the rows that travel with
segments. At one moment results of finished work come first, then messages, and only then does a
free executor start new work (further passes of a growth are no new work); so a stage that
finishes when a prune arrives starts its next pass with it applied.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.machine import (
    Accepted,
    Allocate,
    Commit,
    Complete,
    Discard,
    Done,
    Draft,
    Encode,
    EncodeDone,
    Finish,
    Input,
    Learn,
    Machine,
    Output,
    Pass,
    Poll,
    Received,
    Release,
    Run,
    Send,
    Tick,
    Work,
    WorkResult,
)
from flowspec.core.protocol.messages import GRAPH, Answer, Envelope, Segment, Task
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.emulation.exclusive_links import ExclusiveLinks, Letter, Transfer
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, RowArray, StageExecutor

#: What happens first among events of one moment.
_ARRIVAL, _RESULT, _CARRY_ON, _MESSAGE, _POLL, _TICK = range(6)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of virtual time: ``work(node, work)`` to compute, ``link(source, target, envelope)``
    to travel.

    ``occupy(source, target, envelope)``: how long a message keeps its directed link from the
    next one, before it travels: its bytes over the bandwidth.
    """

    work: Callable[[str, Work], float]
    link: Callable[[str, str, Envelope], float] = lambda source, target, envelope: 0.0
    occupy: Callable[[str, str, Envelope], float] | None = None


def unit_costs(work: Work) -> float:
    """A stage's pass costs 1; a growth's drafting costs 1, charged with its first pass."""
    if isinstance(work, Pass):
        return 1.0
    if isinstance(work, Draft) and work.part.answers and work.growth_pass == 0:
        return 1.0
    return 0.0


UNIT = Costs(lambda node, work: unit_costs(work))


@dataclass(slots=True)
class JobRecord:
    """What the simulated broker knows of a job; times are virtual seconds."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    committed_at: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens so far)
    finish: Finish | None = None
    graph: TaskGraph = field(default_factory=TaskGraph)
    graph_seqs: SeqWriter = field(default_factory=SeqWriter)
    origins: dict[str, str] = field(
        default_factory=dict
    )  # task -> the node its rows or answers come from


@dataclass(slots=True)
class _Node:
    machine: Machine
    executor: StageExecutor | DraftExecutor | None
    busy: bool = False
    outputs: list[RowArray] = field(default_factory=list)
    deadline: float | None = None


Tap = Callable[[str, float, Input, list[Output]], None]


class Simulation:
    """``nodes``: machine and executor by name. ``tap`` sees every step (node, now, input, outputs).

    ``exclusive_transfers``: a segment or an answer that takes time to travel occupies both its
    nodes, by PipeDec's transfer scheduler, and waits until both are free. One that the task
    graph held back travels from the node it comes from once it is let go; without the option
    only the word to go travels then, from the node that gave it.
    """

    def __init__(
        self,
        nodes: Mapping[str, tuple[Machine, StageExecutor | DraftExecutor | None]],
        costs: Costs = UNIT,
        *,
        encode: Callable[[Encode], EncodeDone] | None = None,
        tap: Tap | None = None,
        exclusive_transfers: bool = False,
    ) -> None:
        self._nodes = {
            name: _Node(machine, executor) for name, (machine, executor) in nodes.items()
        }
        self._costs = costs
        self._encode = encode
        self._tap = tap
        self._heap: list[tuple[float, int, int, str, object]] = []
        self._order = itertools.count()
        self._links = ExclusiveLinks(nodes) if exclusive_transfers else None
        self._free_at: dict[tuple[str, str], float] = {}  # directed links that were used
        self._let_go_at: dict[
            str, float
        ] = {}  # by receiver: when the graph's last envelope arrives
        self._rows: dict[tuple[str, str, int], RowArray] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.now = 0.0

    # ---- running ---------------------------------------------------------------------------------

    def post(self, to: str, envelope: Envelope, at: float = 0.0) -> None:
        """Deliver ``envelope`` to ``to`` at virtual time ``at``."""
        self._push(at, _MESSAGE, to, envelope)

    def run(self, until: float = 1e6) -> None:
        """Run until nothing is left to happen; StateError if that takes beyond ``until``."""
        while self._heap:
            now, kind, _, name, what = heapq.heappop(self._heap)
            if now > until:
                raise StateError(f"the simulation is still busy at {until} s")
            self.now = max(self.now, now)
            node = self._nodes[name]
            if kind == _ARRIVAL and self._links is not None:
                self._arrive(self._links, cast(Letter, what))
            elif kind == _MESSAGE:
                self._step(name, Received(self._drain(now, name, what)))
            elif kind == _RESULT:
                node.busy = False
                self._step(name, Done(what))  # type: ignore[arg-type]
            elif kind in (_POLL, _CARRY_ON) and not node.busy and node.machine.runnable:
                self._step(name, Poll())
            elif (
                kind == _TICK and node.machine.deadline is not None and node.machine.deadline <= now
            ):
                self._step(name, Tick())

    def _drain(self, now: float, name: str, first: object) -> tuple[Envelope, ...]:
        """``first`` and what else reaches ``name`` at this moment, in order."""
        batch: list[object] = [first]
        while self._heap and self._heap[0][:2] == (now, _MESSAGE) and self._heap[0][3] == name:
            batch.append(heapq.heappop(self._heap)[4])
        return tuple(envelope for envelope in batch if isinstance(envelope, Envelope))

    def _push(self, at: float, kind: int, node: str, what: object) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), node, what))

    def _step(self, name: str, event: Input) -> None:
        node = self._nodes[name]
        outputs = list(node.machine.step(event, self.now))
        if self._tap is not None:
            self._tap(name, self.now, event, outputs)
        for output in outputs:
            self._perform(name, node, output)
        # A growth's next pass is part of the work that just ended: it does not wait for messages.
        self._push(self.now, _CARRY_ON if node.machine.continuing else _POLL, name, None)
        due = node.machine.deadline
        if due is not None and due != node.deadline:
            self._push(max(due, self.now), _TICK, name, None)
        node.deadline = due

    def machine(self, node: str) -> Machine:
        """The machine of ``node``."""
        return self._nodes[node].machine

    def executor(self, node: str) -> StageExecutor | DraftExecutor | None:
        """The executor of ``node``."""
        return self._nodes[node].executor

    @property
    def rows_held(self) -> int:
        """Segments whose rows were sent and neither computed nor dropped."""
        return len(self._rows)

    @property
    def transfers(self) -> list[Transfer]:
        """With ``exclusive_transfers``: those that took place, by the time they ended."""
        return self._links.log if self._links else []

    # ---- performing ------------------------------------------------------------------------------

    def record(self, job: str) -> JobRecord:
        """What is known of ``job``."""
        return self.jobs.get(job) or self.jobs.setdefault(job, JobRecord())

    def _perform(self, name: str, node: _Node, output: Output) -> None:
        match output:
            case Send():
                self._send(name, node, output)
            case Commit():
                self._commit(name, output)
            case Complete(job, _, tasks):
                self._complete(name, job, tasks)
            case Run(work):
                self._run(name, node, work)
            case Allocate(job, _, capacity, sampling, returns) if node.executor is not None:
                node.executor.allocate(job, capacity, sampling, returns)
            case Release(job) if node.executor is not None:
                node.executor.release(job)
                self._rows = {
                    key: rows for key, rows in self._rows.items() if key[:2] != (name, job)
                }
            case Discard(job, segment):
                self._rows.pop((name, job, segment), None)
            case Learn(job, _, segment, ids):
                cast(DraftExecutor, node.executor).learn(
                    job, ids, self._rows.pop((name, job, segment))
                )
            case Accepted(job, _, prompt):
                self.record(job).prompt = prompt
            case Finish(job):
                self.record(job).finish = output

    def _send(self, name: str, node: _Node, output: Send) -> None:
        message = output.envelope.message
        if output.rows is not None and isinstance(message, Segment | Answer):
            rows = node.outputs[output.rows.part][list(output.rows.offsets)]
            self._rows[output.to, message.job, message.segment] = rows
        if output.task:
            task = Task(message.job, output.task, output.after, output.to, output.envelope)
            self.record(message.job).origins[task.name] = name
            self._complete(name, message.job, output.completes, (task,))
        else:
            self._deliver(name, output.to, output.envelope)
            self._complete(name, message.job, output.completes)

    def _commit(self, name: str, output: Commit) -> None:
        record = self.record(output.job)
        if len(record.tokens) != output.emitted:
            raise StateError(
                f"commit at token {output.emitted} where {len(record.tokens)} are in the output"
            )
        record.tokens += output.tokens
        record.committed_at.append((self.now, len(record.tokens)))
        for to, envelope in zip(output.to, output.prunes, strict=True):
            self._deliver(name, to, envelope)
        self._complete(name, output.job, output.completes)

    def _complete(
        self, source: str, job: str, tasks: Sequence[str], created: Sequence[Task] = ()
    ) -> None:
        record = self.record(job)
        for task in record.graph.apply(tasks, created):
            if task.envelope is not None:
                seq = record.graph_seqs.next(task.to)
                carries_rows = self._links is not None and isinstance(
                    task.envelope.message, Segment | Answer
                )
                origin = record.origins.get(task.name, source) if carries_rows else source
                self._deliver(origin, task.to, replace(task.envelope, seq=seq))

    def _deliver(self, source: str, to: str, envelope: Envelope) -> None:
        seconds = self._costs.link(source, to, envelope)
        if self._costs.occupy is not None and source != to:
            end = max(self.now, self._free_at.get((source, to), 0.0)) + self._costs.occupy(
                source, to, envelope
            )
            self._free_at[source, to] = end
            seconds += end - self.now
        if self._links is not None:
            self._depart(self._links.send(Letter(source, to, envelope, seconds), self.now))
            return
        at = self.now + seconds
        if (
            envelope.sender == GRAPH
        ):  # what the graph lets go is read in that order, whoever let it go
            at = self._let_go_at[to] = max(at, self._let_go_at.get(to, 0.0))
        self._push(at, _MESSAGE, to, envelope)

    def _depart(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._push(self.now + letter.seconds, _ARRIVAL, letter.to, letter)

    def _arrive(self, links: ExclusiveLinks, letter: Letter) -> None:
        delivered, begun = links.arrive(letter, self.now)
        for other in delivered:
            self._push(self.now, _MESSAGE, other.to, other.envelope)
        self._depart(begun)

    def _run(self, name: str, node: _Node, work: Work) -> None:
        node.busy = True
        self._push(
            self.now + self._costs.work(name, work), _RESULT, name, self._compute(name, node, work)
        )

    def _compute(self, name: str, node: _Node, work: Work) -> WorkResult:
        if isinstance(work, Encode):
            if self._encode is None:
                raise StateError("this simulation takes jobs with prompt_ids only")
            return self._encode(work)
        if isinstance(work, Draft):
            return cast(DraftExecutor, node.executor).run(work)
        inputs = [
            None if part.tokens else self._rows.pop((name, part.job, part.segment))
            for part in work.parts
        ]
        result, node.outputs = cast(StageExecutor, node.executor).run(work, inputs)
        return result
