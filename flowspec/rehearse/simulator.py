"""Machines under a virtual clock: an event heap, costs as functions, results computed at once.

The simulation is also the broker: a ledger decides what is delivered, and the rows that travel with
segments are kept beside it. At one moment results come first, then messages, and then free
executors start new work; a further pass of a growth is not new work. So if a prune arrives when a
stage's pass ends, the stage applies it before the next pass.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address
from flowspec.core.protocol.bundles import Bundle, bundled
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.ledger import Delivery, Ledger
from flowspec.core.protocol.machine import (
    Allocate,
    Commit,
    Complete,
    Compute,
    Discard,
    Done,
    Evict,
    Finish,
    Granted,
    Input,
    Keep,
    Learn,
    Machine,
    OpenJob,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import Answer, Envelope, Segment, Synced
from flowspec.core.protocol.refusals import refusal
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.protocol.work import (
    DraftPass,
    Encode,
    EncodeDone,
    EncodeTurns,
    Pass,
    Work,
    WorkResult,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.spec import JobSpec
from flowspec.errors import StateError
from flowspec.model.base import (
    DraftExecutor,
    RowArray,
    StageExecutor,
    allocate,
    drafted,
    evict,
    keeping,
)
from flowspec.rehearse.devices.arrivals import Arrivals, Parcel
from flowspec.rehearse.devices.departures import Departures
from flowspec.rehearse.devices.exclusive_links import ExclusiveLinks, Letter, Transfer
from flowspec.rehearse.devices.links import DirectedLinks
from flowspec.rehearse.devices.way import NO_BROKER, Travelling, Way

#: Order of the events of one moment.
_ARRIVAL, _ENTRY, _RESULT, _CARRY_ON, _MESSAGE, _POLL, _TICK = range(7)
#: Limit of queued and running jobs: none.
_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds of virtual time.

    ``work(node, work)``: to compute. ``link(source, target, envelope)``: to travel.
    ``occupy(source, to, envelope)``: how long a message for ``to`` occupies a directed link before
    it travels (its bytes over the bandwidth). ``way``: the links that a message takes.
    ``hop``: charged to every message once, beside its links.
    ``exclusive``, only without a broker: a segment or an answer that takes time to travel occupies
    both its nodes for all of it, by PipeDec's transfer scheduler, and waits until both are free.
    """

    work: Callable[[Address, Work], float]
    link: Callable[[Address, Address, Envelope], float] = lambda source, target, envelope: 0.0
    occupy: Callable[[Address, Address, Envelope], float] | None = None
    exclusive: bool = False
    way: Way = NO_BROKER
    hop: float = 0.0


def unit_costs(work: Work) -> float:
    """A stage's pass costs 1; a growth's drafting costs 1, charged with its first pass."""
    if isinstance(work, Pass):
        return 1.0
    if isinstance(work, DraftPass):
        begun = (draft.part.answers and draft.growth_pass == 0 for draft in work.drafts)
        return 1.0 if any(begun) else 0.0
    return 0.0


UNIT = Costs(lambda node, work: unit_costs(work))


@dataclass(slots=True)
class RunRecord:
    """The outcome of a run; times are virtual seconds.

    ``committed_at``: per commit the time at which the broker has it, and the number of tokens after
    it. ``origins``: without a broker, the node that a graph task's rows or answers come from.
    """

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    committed_at: list[tuple[float, int]] = field(default_factory=list)
    finish: Finish | None = None
    origins: dict[str, Address] = field(default_factory=dict)


@dataclass(slots=True)
class _Node:
    address: Address
    machine: Machine
    executor: StageExecutor | DraftExecutor | None
    departures: Departures
    arrivals: Arrivals
    busy: bool = False
    outputs: list[RowArray] = field(default_factory=list)
    deadline: float | None = None


Tap = Callable[[Address, float, Input, list[Output]], None]
#: Outputs that concern only the node's executor and its rows.
_Local = Allocate | Release | Keep | Evict | Discard | Learn | Granted
#: Outputs that are no messages.
_Unsent = Commit | Complete | Finish | OpenJob | Compute | _Local


class Simulation:
    """A pipeline of ``nodes``: machine and executor by address.

    ``tap`` gets every step (node, now, input, outputs). The ledger decides at once; what it
    delivers takes the links of ``costs.way``. Messages that leave a node at one moment travel in
    bundles, but not over exclusive links. Without a broker there, a message that the task graph
    held travels over exclusive links from its origin once it is released; over others only the
    release travels then, from the node that caused it.
    """

    def __init__(
        self,
        nodes: Mapping[Address, tuple[Machine, StageExecutor | DraftExecutor | None]],
        costs: Costs = UNIT,
        *,
        encode: Callable[[Encode], EncodeDone] | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.ledger = Ledger()
        self.runs: dict[RunKey, RunRecord] = {}
        self.now = 0.0
        self._way = costs.way
        links = DirectedLinks(costs.link, costs.occupy)
        self._nodes = {
            address: _Node(
                address,
                machine,
                executor,
                Departures(costs.way, address, links),
                Arrivals(address, links, costs.hop),
            )
            for address, (machine, executor) in nodes.items()
        }
        self._costs = costs
        self._encode = encode
        self._tap = tap
        self._heap: list[tuple[float, int, int, _Node, object]] = []
        self._order = itertools.count()
        self._links = ExclusiveLinks(nodes) if costs.exclusive else None
        self._free_at: dict[tuple[Address, Address], float] = {}  # by directed link
        # By receiver: when the last envelope arrives that one of the graph must not overtake.
        self._settled_at: dict[Address, float] = {}
        self._rows: dict[tuple[Address, RunKey, int], RowArray] = {}
        self._bundles = 0  # entries with messages of several runs

    # ---- running ---------------------------------------------------------------------------------

    def submit(self, job: str, spec: JobSpec, at: float = 0.0) -> None:
        """Assign ``job`` to the draft worker at virtual time ``at``; StateError if it is known."""
        if self.ledger.admit(job, spec.fields(), _MANY).code is not Code.OK:
            raise StateError(f"job {job} was submitted before")
        (submit,) = self.ledger.assign(job, _MANY).deliveries
        self.runs[submit.envelope.message.run] = RunRecord()
        self.post(submit.to, submit.envelope, at)

    def revoke(self, job: str, at: float = 0.0) -> None:
        """End ``job`` from outside; its workers get the Revoke at virtual time ``at``."""
        for told in self.ledger.revoke(job, tuple(self._nodes)).deliveries:
            self.post(told.to, told.envelope, at)

    def post(self, to: Address, envelope: Envelope, at: float = 0.0) -> None:
        """Deliver ``envelope`` to ``to`` at virtual time ``at``, without the ledger."""
        self._push(at, _MESSAGE, self._nodes[to], (envelope,))

    def run(self, until: float = 1e6) -> None:
        """Run until no events are left; StateError if one comes after ``until``."""
        while self._heap:
            now, kind, _, node, what = heapq.heappop(self._heap)
            if now > until:
                raise StateError(f"the simulation is still busy at {until} s")
            self.now = max(self.now, now)
            self._happen(now, kind, node, what)

    def _happen(self, now: float, kind: int, node: _Node, what: object) -> None:
        if kind == _ARRIVAL and self._links is not None:
            self._arrive(self._links, cast(Letter, what))
        elif kind == _ENTRY:
            self._enter(node, cast(Parcel, what))
        elif kind == _MESSAGE:
            self._step(node, Received(self._drain(now, node, what)))
        elif kind == _RESULT:
            node.busy = False
            self._step(node, Done(cast(WorkResult, what)))
        elif kind in (_POLL, _CARRY_ON) and not node.busy and node.machine.runnable:
            self._step(node, Poll())
        elif kind == _TICK and node.machine.deadline is not None and node.machine.deadline <= now:
            self._step(node, Tick())

    def _drain(self, now: float, node: _Node, first: object) -> tuple[Envelope, ...]:
        """``first`` and the next messages that reach ``node`` at this moment, in order."""
        batch = [first]
        heap = self._heap
        while heap and heap[0][3] is node and heap[0][:2] == (now, _MESSAGE):
            batch.append(heapq.heappop(heap)[4])
        return tuple(envelope for entry in batch for envelope in cast(tuple[Envelope, ...], entry))

    def _push(self, at: float, kind: int, node: _Node, what: object) -> None:
        heapq.heappush(self._heap, (at, kind, next(self._order), node, what))

    def _step(self, node: _Node, event: Input) -> None:
        pending: list[Input] = [event]
        while pending:
            event = pending.pop(0)
            outputs = list(node.machine.step(event, self.now))
            if self._tap is not None:
                self._tap(node.address, self.now, event, outputs)
            entries = outputs if self._links is not None else bundled(outputs, _run_of)
            for entry in entries:
                pending += self._perform(node, entry)
        # A growth's next pass continues the work that just ended: it does not wait for messages.
        self._push(self.now, _CARRY_ON if node.machine.continuing else _POLL, node, None)
        due = node.machine.deadline
        if due is not None and due != node.deadline:
            self._push(max(due, self.now), _TICK, node, None)
        node.deadline = due

    # ---- inspection ------------------------------------------------------------------------------

    @property
    def jobs(self) -> dict[str, RunRecord]:
        """The record of every job's latest run."""
        return {run.job: record for run, record in sorted(self.runs.items())}

    def machine(self, address: Address) -> Machine:
        """The machine of ``address``."""
        return self._nodes[address].machine

    def executor(self, address: Address) -> StageExecutor | DraftExecutor | None:
        """The executor of ``address``."""
        return self._nodes[address].executor

    def graph(self, job: str) -> TaskGraph:
        """The task graph of the current run of ``job``."""
        return self.ledger.jobs[job].graph

    @property
    def rows_held(self) -> int:
        """The number of segments whose rows were sent and neither computed nor dropped."""
        return len(self._rows)

    @property
    def transfers(self) -> list[Transfer]:
        """Completed transfers in the order of their ends; none unless links are exclusive."""
        return self._links.log if self._links else []

    # ---- performing ------------------------------------------------------------------------------

    def _perform(self, node: _Node, output: Output | Bundle) -> list[Refused]:
        """Perform an output; the inputs for its machine if the ledger refused it."""
        match output:
            case Send():
                return self._send(node, (output,), self._stamp(node, output))
            case Bundle(sends):
                return self._send(node, sends, self._stamp(node, output))
            case _:
                refused = self._perform_one(node, output)
                return [refused] if refused is not None else []

    def _perform_one(self, node: _Node, output: _Unsent) -> Refused | None:
        match output:
            case Commit():
                return self._commit(node, output)
            case Complete(run, _):
                change = self.ledger.complete(output, self._stamp(node, output))
                self._deliver_all(node.address, run, change.deliveries)
                return refusal(run, "a task's completion", change.code)
            case OpenJob(run, prompt):
                code = self.ledger.open(output)
                if code is Code.OK:
                    self.runs[run].prompt = prompt
                return refusal(run, "the prompt", code)
            case Finish(run):
                if self.ledger.finish(run) is Code.OK:
                    self.runs[run].finish = output
            case Compute(work):
                self._run(node, work)
            case _:
                self._perform_here(node, output)
        return None

    def _perform_here(self, node: _Node, output: _Local) -> None:
        """Perform an output that concerns only this node's executor and its rows."""
        match output:
            case Allocate():
                if node.executor is not None:
                    allocate(node.executor, output)
            case Keep(run, caches):
                keeping(node.executor).keep(run, caches)
            case Evict(run):
                evict(node.executor, run)
            case Release(run):
                if node.executor is not None:
                    node.executor.release(run)
                gone = [key for key in self._rows if key[:2] == (node.address, run)]
                for key in gone:
                    del self._rows[key]
            case Discard(run, segment):
                self._rows.pop((node.address, run, segment), None)
            case Learn(run, segment, ids):
                rows = self._rows.pop((node.address, run, segment))
                cast(DraftExecutor, node.executor).learn(run, ids, rows)

    def _send(self, node: _Node, sends: Sequence[Send], stamp: Stamp | None) -> list[Refused]:
        """Send one entry with messages of different runs."""
        refused = []
        deliveries: list[Delivery] = []
        changes = self.ledger.publish_together(sends, stamp)
        for send, change in zip(sends, changes, strict=True):
            run = send.envelope.message.run
            if change.code is Code.OK:
                self._keep_rows(node, send)
            why = refusal(run, f"a message to {send.to}", change.code)
            refused += [why] if why is not None else []
            deliveries += change.deliveries
        if len(sends) > 1:
            self._deliver_entry(node.address, deliveries)
        else:
            self._deliver_all(node.address, run, deliveries)
        return refused

    def _keep_rows(self, node: _Node, send: Send) -> None:
        """Keep the rows of ``send`` for its receiver, and where those of a task come from."""
        message = send.envelope.message
        if send.rows is not None and isinstance(message, Segment | Answer):
            rows = node.outputs[send.rows.part][list(send.rows.offsets)]
            self._rows[send.to, message.run, message.segment] = rows
        if send.task and self._way.box is None:
            self.runs[message.run].origins[send.task] = node.address
            self._settle(DRAFT, self.now + self._costs.link(node.address, DRAFT, send.envelope))

    def _commit(self, node: _Node, output: Commit) -> Refused | None:
        stamp = self._stamp(node, output)
        change = self.ledger.commit(output, stamp)
        if change.code is Code.OK:
            record = self.runs[output.run]
            if len(record.tokens) != output.emitted:
                raise StateError(
                    f"commit at token {output.emitted} where {len(record.tokens)} are in the output"
                )
            record.tokens += output.tokens
            record.committed_at.append((stamp.at if stamp else self.now, len(record.tokens)))
        self._deliver_all(node.address, output.run, change.deliveries)
        return refusal(output.run, "a commit", change.code)

    # ---- links -----------------------------------------------------------------------------------

    def _stamp(self, node: _Node, output: Travelling) -> Stamp | None:
        """Where ``output`` is next, and when; None if no broker is charged."""
        return None if self._way.box is None else node.departures.stamp(output, self.now)

    def _deliver_all(self, source: Address, run: RunKey, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.stamp is not None:
                parcel = Parcel(delivery.stamp, (delivery.envelope,))
                self._expect(self._nodes[delivery.to], parcel)
                continue
            origin = source
            carries_rows = isinstance(delivery.envelope.message, Segment | Answer)
            if delivery.task and carries_rows and self._links is not None:
                origin = self.runs[run].origins.get(delivery.task, source)
            self._deliver(origin, delivery.to, (delivery.envelope,))

    def _deliver_entry(self, source: Address, deliveries: Sequence[Delivery]) -> None:
        """Deliver what the ledger let pass of a bundle."""
        if not deliveries:
            return
        self._bundles += len(deliveries) > 1
        number = self._bundles if len(deliveries) > 1 else 0
        entry = tuple(replace(known.envelope, bundle=number) for known in deliveries)
        first = deliveries[0]
        if first.stamp is not None:
            self._expect(self._nodes[first.to], Parcel(first.stamp, entry))
        else:
            self._deliver(source, first.to, entry)

    def _expect(self, node: _Node, parcel: Parcel) -> None:
        node.arrivals.expect(parcel)
        if parcel.stamp.at <= self.now or node.arrivals.is_here(parcel):
            self._enter(node, parcel)
        else:
            self._push(parcel.stamp.at, _ENTRY, node, parcel)

    def _enter(self, node: _Node, parcel: Parcel) -> None:
        """Let a message take its last link."""
        for at, known in node.arrivals.enter(parcel):
            self._push(at, _MESSAGE, node, known.entry)

    def _deliver(self, source: Address, to: Address, entry: tuple[Envelope, ...]) -> None:
        envelope = entry[0]
        seconds = self._costs.link(source, to, envelope) + self._costs.hop
        if self._costs.occupy is not None and source != to:
            begin = self.now
            if self._links is None:  # else the transfer scheduler alone makes messages wait
                begin = max(begin, self._free_at.get((source, to), 0.0))
            end = begin + sum(self._costs.occupy(source, to, each) for each in entry)
            self._free_at[source, to] = end
            seconds += end - self.now
        if self._links is not None:
            if isinstance(envelope.message, Synced):
                seconds = max(seconds, self._settled_at.get(to, 0.0) - self.now)
            self._depart(self._links.send(Letter(source, to, envelope, seconds), self.now))
            return
        at = self.now + seconds
        if envelope.sender == GRAPH:
            at = max(at, self._settled_at.get(to, 0.0))
        if envelope.sender == GRAPH or isinstance(envelope.message, Answer):
            self._settle(to, at)
        self._push(at, _MESSAGE, self._nodes[to], entry)

    def _settle(self, to: Address, at: float) -> None:
        """No envelope of the graph reaches ``to`` before ``at``.

        They are read in the order of release, whichever node caused it; and a join follows the
        answers and completions that it waited for, on whatever link those travel. Exclusive links
        keep the order of release and of answers themselves.
        """
        self._settled_at[to] = max(at, self._settled_at.get(to, 0.0))

    def _depart(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._push(self.now + letter.seconds, _ARRIVAL, self._nodes[letter.to], letter)

    def _arrive(self, links: ExclusiveLinks, letter: Letter) -> None:
        delivered, begun = links.arrive(letter, self.now)
        for other in delivered:
            self._push(self.now, _MESSAGE, self._nodes[other.to], (other.envelope,))
        self._depart(begun)

    # ---- computing -------------------------------------------------------------------------------

    def _run(self, node: _Node, work: Work) -> None:
        node.busy = True
        result = self._compute(node, work)
        self._push(self.now + self._costs.work(node.address, work), _RESULT, node, result)

    def _compute(self, node: _Node, work: Work) -> WorkResult:
        if isinstance(work, Encode | EncodeTurns):
            if self._encode is None or isinstance(work, EncodeTurns):
                raise StateError("this simulation takes jobs with prompt_ids only")
            return self._encode(work)
        if isinstance(work, DraftPass):
            return drafted(cast(DraftExecutor, node.executor), work)
        inputs = [
            None if part.tokens else self._rows.pop((node.address, part.run, part.segment))
            for part in work.parts
        ]
        result, node.outputs = cast(StageExecutor, node.executor).run(work, inputs)
        return result


def _run_of(output: Output) -> RunKey | None:
    """The run that an output other than a message concerns; None: a pass, whose rows come next."""
    return None if isinstance(output, Compute | Send) else output.run
