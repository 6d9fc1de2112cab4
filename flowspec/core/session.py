"""One job at the draft worker: its tree, what is in flight, and the moves between them.

Theory of operation. The root is a token the target has decided but not yet run. Segments of T are in
flight or waiting; answers come back by node id. As soon as the strategy allows, answers are judged:
accepted nodes become context, the target's next choice becomes the root, everything not below it is
pruned. If that choice was not in T, a new round begins from a fresh root. Prompt tokens are nodes
0 .. L-1 of a chain, the last of them the first root.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flowspec.core.accept import Verdict, follow
from flowspec.core.drafting import Drafting
from flowspec.core.jobs import JobSpec
from flowspec.core.machine import Commit, Complete, Output, Send
from flowspec.core.messages import (
    DRAFT,
    GRAPH,
    Close,
    Envelope,
    Hop,
    Message,
    Open,
    Prune,
    Result,
    Segment,
    stage_node,
)
from flowspec.core.pace import Free, Lockstep, Pace
from flowspec.core.segments import prefill_chunks
from flowspec.core.sequence import SeqReader, SeqWriter
from flowspec.core.stats import Tally
from flowspec.core.strategy import Occasion, Strategy, View
from flowspec.core.tree import Tree
from flowspec.errors import JobError, StateError

#: Tree rows sent and live at once; bounds every stage's KV rows beyond the context.
TREE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """What the models and the pipeline allow; ``context`` in tokens, prompt and output together."""

    stages: int
    context: int
    vocabulary: int
    eos: frozenset[int]
    tree_rows: int = TREE_ROWS
    stall_seconds: float = 120.0  # a job without an answer for so long has failed


@dataclass(slots=True)
class _Flight:
    """A segment on its way; ``live`` are its rows no prune has reached."""

    live: set[int]


class Session:
    """A running job; outputs are collected in ``outbox`` and taken by the machine."""

    def __init__(
        self, job: str, epoch: int, spec: JobSpec, prompt: tuple[int, ...], limits: Limits, strategy: Strategy,
        now: float,
    ) -> None:  # fmt: skip
        self.job, self.epoch, self.spec, self.limits, self.strategy = job, epoch, spec, limits, strategy
        self.prompt = prompt
        self.output: list[int] = []
        self.budget = min(spec.max_new_tokens, limits.context - len(prompt))
        self.seen = SeqReader()
        self.outbox: list[Output] = []
        self.tally = Tally(now)
        self.closing = ""  # finish reason once the text is complete
        self.progress_at = now
        self.patience = limits.stall_seconds * len(prefill_chunks(len(prompt)))  # only the last is answered
        self.drafting = Drafting(job, epoch, prompt, strategy.width)
        self._pace: Pace = Lockstep(limits.stages) if strategy.lockstep else Free()
        self._tree = Tree(len(prompt) - 1)
        self._tree.plant(prompt[-1], len(prompt) - 1, len(prompt) - 2)
        self._offset = len(prompt) - 1
        self._writer = SeqWriter()
        self._stages = tuple(stage_node(stage) for stage in range(1, limits.stages + 1))
        self._next_segment = 0
        self._waiting: deque[list[int]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._answers: dict[int, int] = {}
        self._sent: set[int] = {self._tree.root}
        self._exhausted = False  # an idle growth found nothing; ask again after the next verdict
        self._owed = 0  # lockstep: segments due before the next answer
        self._begin()

    # ---- what the machine asks -----------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Segments sent and neither answered nor emptied by a prune."""
        return sum(bool(flight.live) for flight in self._flights.values())

    @property
    def tree(self) -> Tree:
        return self._tree

    def _view(self) -> View:
        return View(self._tree, self.in_flight, len(self._waiting))

    # ---- start ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        length = len(self.prompt)
        capacity = length + self.budget + self.limits.tree_rows
        self._tell_stages(Open(self.job, self.epoch, length, capacity, self.spec.sampling, record=self.spec.record))
        for chunk in prefill_chunks(length):
            parents = tuple(position - 1 for position in chunk)
            tokens = tuple(self.prompt[position] for position in chunk)
            self._send(Segment(self.job, self.epoch, self._number(), 0, tuple(chunk), parents, tuple(chunk), tokens))

    def _number(self) -> int:
        self._next_segment += 1
        return self._next_segment - 1

    # ---- answers -------------------------------------------------------------------------------------

    def answer(self, result: Result, now: float) -> None:
        """Take the target's choices for one segment, judge if the strategy agrees, and go on."""
        flight = self._flights.pop(result.segment, None)
        self.progress_at, self.patience = now, self.limits.stall_seconds
        if flight is not None and not flight.live <= set(result.ids):
            raise StateError(f"segment {result.segment} came back without rows that are still live")
        for node, token in zip(result.ids, result.tokens, strict=True):
            if node in self._sent:
                self._answers[node] = token
        if self.closing:
            return
        stepped = self._pace.answered() if flight is not None else ()
        self._owed += flight is not None and self._pace.markers
        verdict = None
        if self.strategy.judges(self._view()):
            budget = self.budget - len(self.output)
            verdict = follow(self._tree, self._answers, budget=budget, eos=self.limits.eos)
        if verdict is not None:
            self._judge(verdict, stepped, now)
        elif stepped:
            self.outbox.append(Complete(self.job, self.epoch, stepped))
            self._grow(Occasion.IDLE)
        self.settle()

    def _judge(self, verdict: Verdict, stepped: tuple[str, ...], now: float) -> None:
        self._count(verdict, now)
        path = [(node, self._tree[node].token) for node in verdict.accepted]
        emitted = len(self.output)
        self.output += verdict.tokens
        self.closing = verdict.finish
        if verdict.finish:
            root, occasion = self._tree.next_id, None
            self._sent.clear()
        elif verdict.successor is not None:
            root, occasion = verdict.successor, Occasion.VERDICT
            self._tree.advance(root)
        else:
            root, occasion = self._plant(verdict), Occasion.ROUND
            stepped += self._pace.start_round(self.tally.rounds)
        self._forget_pruned(miss=occasion is not Occasion.VERDICT)
        prune = Prune(self.job, self.epoch, self._offset, verdict.accepted, root, tuple(sorted(self._sent)))
        self._commit(prune, emitted, verdict, stepped)
        self.drafting.commit(path, root)
        if occasion is None:
            self._tell_stages(Close(self.job, self.epoch))
        else:
            self._grow(occasion)

    def _plant(self, verdict: Verdict) -> int:
        position = len(self.prompt) + len(self.output) - 1
        self.tally.rounds += 1
        return self._tree.plant(verdict.tokens[-1], position, verdict.accepted[-1])

    def _commit(self, prune: Prune, emitted: int, verdict: Verdict, completes: tuple[str, ...]) -> None:
        prunes = tuple(Envelope(DRAFT, self._writer.next(node), prune) for node in self._stages)
        self.outbox.append(
            Commit(
                self.job, self.epoch, self._offset, emitted, len(verdict.accepted), verdict.tokens, verdict.finish,
                self._stages, prunes, completes,
            )
        )  # fmt: skip
        self._offset += len(verdict.accepted)

    def _count(self, verdict: Verdict, now: float) -> None:
        self.tally.last_token_at = now
        if self.tally.first_token_at is None:
            self.tally.first_token_at = now
        else:
            self.tally.choices += len(verdict.tokens)
            self.tally.hits += verdict.hits

    def _forget_pruned(self, *, miss: bool) -> None:
        """Free what a verdict made void: flights, waiting segments and answers."""
        self._exhausted = False
        if miss:
            self._flights.clear()
            self._waiting.clear()
            self._answers.clear()
            self._sent.clear()
            self._owed = self.strategy.capacity if self._pace.markers else 0
            return
        nodes = self._tree.nodes.keys()
        self._sent &= nodes
        self._answers = {node: token for node, token in self._answers.items() if node in nodes}
        for flight in self._flights.values():
            flight.live &= nodes
        if not self._pace.markers:
            self._flights = {number: flight for number, flight in self._flights.items() if flight.live}
        waiting = ([node for node in segment if node in nodes] for segment in self._waiting)
        self._waiting = deque(segment for segment in waiting if segment)

    # ---- growth --------------------------------------------------------------------------------------

    def _grow(self, occasion: Occasion) -> None:
        if occasion is Occasion.VERDICT:
            self._take_grown(self.drafting.harvest(self._tree))
        growth = self.strategy.grow(self._view(), occasion)
        self.drafting.begin(growth, idle=occasion is Occasion.IDLE)
        if occasion is Occasion.ROUND and growth is None:
            self._waiting.append([self._tree.root])

    def settle(self) -> None:
        """Send what may be sent and carry growths on, until something has to be drafted or answered."""
        while not self.closing:
            self._send_waiting()
            if not self.drafting.growing and not self._may_fill():
                return
            if not self.drafting.growing:
                self._grow(Occasion.IDLE)
                self._exhausted = not self.drafting.growing
                continue
            segments = self.drafting.advance(self._tree)
            if segments is None:
                return
            self._take_grown(segments)

    def _take_grown(self, segments: list[list[int]]) -> None:
        for segment in segments:
            if len(segment) > self.limits.tree_rows:
                raise JobError(f"a segment has {len(segment)} rows; the pipeline holds {self.limits.tree_rows}")
            self._tree.select(segment)
            self._waiting.append(segment)
        if not segments and self.drafting.was_idle:
            self._exhausted = True

    def _may_fill(self) -> bool:
        planted = self.tally.rounds > 0
        room = len(self._flights) < self.strategy.capacity and not self._waiting
        return planted and room and not self._exhausted and not self._pace.markers

    def _send_waiting(self) -> None:
        while self._waiting and self._may_send(self._waiting[0]):
            self._send_tree_segment(self._waiting.popleft())
        if self._owed and not self._waiting and not self.drafting.growing:
            self._send_tree_segment([])  # a bubble: the stages still count the step

    def _may_send(self, segment: list[int]) -> bool:
        if len(self._sent) + len(segment) > self.limits.tree_rows:
            return False
        if self._pace.markers:
            return self._owed > 0
        return len(self._flights) < self.strategy.capacity

    def _send_tree_segment(self, ids: list[int]) -> None:
        nodes = [self._tree[node] for node in ids]
        number = self._number()
        hops = self._pace.hops()
        segment = Segment(
            self.job, self.epoch, number, self.tally.rounds, tuple(ids), tuple(node.parent for node in nodes),
            tuple(node.position for node in nodes), tuple(node.token for node in nodes),
            marker=self._pace.markers, route=hops[1:],
        )  # fmt: skip
        self._flights[number] = _Flight(set(ids))
        self._sent.update(ids)
        self._owed = max(0, self._owed - 1)
        self.tally.segments += bool(ids)
        self._send(segment, hops[0] if hops else None)

    # ---- sending -------------------------------------------------------------------------------------

    def _send(self, segment: Segment, hop: Hop | None = None) -> None:
        node = self._stages[0]
        if hop is None:
            self.outbox.append(Send(node, Envelope(DRAFT, self._writer.next(node), segment)))
        else:
            self.outbox.append(Send(node, Envelope(GRAPH, 0, segment), task=hop.task, after=hop.after))

    def _tell_stages(self, message: Message) -> None:
        for node in self._stages:
            self.outbox.append(Send(node, Envelope(DRAFT, self._writer.next(node), message)))

    def close_stages(self) -> None:
        """Tell every stage that the job is over."""
        self._tell_stages(Close(self.job, self.epoch))
