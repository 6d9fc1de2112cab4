"""One job at the draft worker: its tree, what is in flight, and the moves between them.

Theory of operation. The root is a token the target has decided but not yet run. Segments of T
are in flight or waiting; answers come back by node id. As soon as the strategy allows, answers
are judged: accepted nodes become context, the target's next choice becomes the root, everything
not below it is pruned. If that choice was not in T, a new round begins from a fresh root. Prompt
tokens are nodes 0 .. L-1 of a chain, the last of them the first root.
"""

from __future__ import annotations

from collections import deque

from flowspec.core.drafting.calibration import Calibrations
from flowspec.core.drafting.drafting import Drafting
from flowspec.core.job.in_flight import InFlightWindow
from flowspec.core.job.model_chain import ModelChain
from flowspec.core.job.outbox import Outbox
from flowspec.core.job.pacing import Timestep
from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.job.stats import Tally
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.core.protocol.messages import DRAFT, Answer, Close, Open, Prune, Returns, Synced
from flowspec.core.protocol.sequence import SeqReader
from flowspec.core.run.history import History
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec
from flowspec.core.tree.accept import Verdict, follow
from flowspec.core.tree.segments import prefill_chunks
from flowspec.core.tree.tree import Tree
from flowspec.errors import JobError


class Session:
    """A running job; outputs are collected in ``out`` and taken by the machine."""

    def __init__(
        self,
        job: str,
        epoch: int,
        spec: JobSpec,
        prompt: tuple[int, ...],
        limits: Limits,
        strategy: Strategy,
        now: float,
        history: History,
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.spec = spec
        self.limits = limits
        self.strategy = strategy
        self.prompt = prompt
        self.output: list[int] = []
        self.budget = min(spec.max_new_tokens, limits.context - len(prompt))
        self.seen = SeqReader()
        self.out = Outbox(job, epoch, limits.stages)
        self.tally = Tally(now, lossy=strategy.lossy)
        self.closing = ""  # finish reason once the text is complete
        self.progress_at = self._now = now
        self.patience = limits.stall_seconds * len(
            prefill_chunks(len(prompt))
        )  # only the last is answered
        sampled = spec.sampling.temperature > 0
        coupled = strategy.coupled and sampled
        drafters = strategy.among(limits.drafters)
        self.returns = Returns(top=strategy.top, hidden=any(drafters) and strategy.width > 0)
        strategy.recall(history, sampled=sampled, drafters=len(drafters))
        known = (
            history.recall(Calibrations).table(coupled=coupled, sampled=sampled)
            if strategy.calibrated
            else None
        )
        self.drafting = Drafting(
            job, epoch, prompt, strategy.width, coupled, drafters, strategy.redrafts, known
        )
        self._pace = strategy.pace
        self._tree = Tree(len(prompt) - 1)
        self._tree.plant(prompt[-1], len(prompt) - 1, len(prompt) - 2)
        self._offset = len(prompt) - 1
        self._waiting: deque[list[int]] = deque()
        self._flights = InFlightWindow(self._tree.root)
        self._exhausted = False  # an idle growth found nothing; ask again after the next verdict
        self._owed = 0  # lockstep: segments due before the next answer
        self._slot = False  # timesteps: one segment may be sent where one ends
        self._drafting_owed = False  # timesteps: the join waits for the drafter
        middles = limits.middles if strategy.middles else 0
        self._links = ModelChain(job, epoch, prompt, middles, limits.tree_rows, self.out)
        self._begin()

    # ---- what the machine asks -------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Segments sent and neither answered nor emptied by a prune."""
        return len(self._flights.loaded)

    @property
    def tree(self) -> Tree:
        return self._tree

    @property
    def workers(self) -> int:
        """How many hold rows of this job and report on it."""
        return self.limits.stages + len(self._links.nodes)

    def _view(self) -> View:
        tally = self.tally
        covering = self._flights.covering
        return View(
            self._tree,
            self.in_flight,
            len(self._waiting),
            covering,
            tally.rounds > 0,
            self.drafting.pass_seconds,
            tally.choices,
            tally.decoding,
        )

    # ---- start -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        length = len(self.prompt)
        capacity = length + self.budget + self.limits.tree_rows
        sampling = self.spec.sampling
        record = self.spec.record
        self.out.tell(
            self.out.stages,
            Open(self.job, self.epoch, length, capacity, sampling, self.returns, record),
        )
        self.out.prefill(self.out.stages[0], self.prompt)
        for node in self._links.nodes:
            self.out.send(
                node, Open(self.job, self.epoch, length, capacity, sampling, record=record)
            )
            self.out.prefill(node, self.prompt)

    # ---- answers ---------------------------------------------------------------------------------

    def answer(self, sender: str, result: Answer, now: float) -> None:
        """Take a model's choices for one segment, judge if the strategy agrees, and go on."""
        self.progress_at = self._now = now
        middle = self._links.model_of(sender)
        if middle is not None:
            if not self.closing:
                self._links.land(middle, result, self._view())
                self.strategy.verified(self._view(), self._links.tips)
                self._exhausted = False
            self.settle(now)
            return
        self.patience = self.limits.stall_seconds
        flight = self._flights.land(result, now)
        if self.closing:
            return
        first = not self.tally.rounds
        prompted = (
            first and self._tree.root in result.ids
        )  # its earlier chunks may be answered, too
        prompt = (
            RoundTrip(len(self.prompt), now - self.tally.submitted_at, alone=True)
            if prompted
            else None
        )
        self.strategy.heard(self._view(), result, flight.trip(now) if flight else prompt)
        stepped = self._pace.answered() if flight else ()
        self._owed += bool(flight) and self._pace.markers
        if first or not self._pace.barrier:
            self._judge(stepped)
        if first and self.tally.rounds and self._pace.barrier:
            self._next_timestep()
        else:
            self.settle(now)

    def synced(self, message: Synced, now: float) -> None:
        """A timestep has ended: judge what came back, send the next segment, begin the next
        timestep.
        """
        if self.closing or not isinstance(self._pace, Timestep):
            return
        self._now = now
        self._judge((self._pace.verdict,))
        if not self.closing:
            self._next_timestep()

    def _next_timestep(self) -> None:
        assert isinstance(self._pace, Timestep)
        self._slot = True
        self.settle(self._now)
        self._slot = False
        self._drafting_owed = self.drafting.wants(self._tree)
        task, after = self._pace.advance(self._flights.loaded, drafting=self._drafting_owed)
        self.out.join(DRAFT, Synced(self.job, self.epoch, task), task, after)

    def _judge(self, stepped: tuple[str, ...]) -> None:
        verdict = None
        if self.strategy.judges(self._view()):
            verdict = follow(
                self._tree,
                self._flights.answers,
                budget=self.budget - len(self.output),
                eos=self.limits.eos,
                candidates=self.strategy.candidates,
                decide=self._decide,
            )
        if verdict is not None:
            self._apply(verdict, stepped)
        elif stepped:
            self.out.complete(stepped)
            if self._pace.markers:
                self._grow(Occasion.IDLE)

    def _decide(self, node: int, token: int) -> int:
        return self.strategy.decide(self._tree, node, token, self._flights.tops.get(node, ()))

    def _apply(self, verdict: Verdict, stepped: tuple[str, ...]) -> None:
        self.tally.count(len(verdict.tokens), verdict.hits, self._now)
        self.drafting.observe(self._tree, verdict)
        accepted = [self._tree[node] for node in verdict.accepted]
        emitted = len(self.output)
        self.output += verdict.tokens
        self.closing = verdict.finish
        if verdict.finish:
            root = self._tree.next_id
            occasion = None
            self._flights.clear()
        elif verdict.successor is not None:
            root = verdict.successor
            occasion = Occasion.VERDICT
            self._tree.advance(root)
        else:
            root = self._plant(verdict)
            occasion = Occasion.ROUND
            stepped += self._pace.start_round(self.tally.rounds)
        self._forget_pruned(miss=occasion is not Occasion.VERDICT)
        prune = Prune(
            self.job,
            self.epoch,
            self._offset,
            verdict.accepted,
            root,
            tuple(sorted(self._flights.sent)),
        )
        self.out.commit(prune, emitted, verdict, stepped)
        self._offset += len(verdict.accepted)
        self.drafting.commit(accepted, root, self._tree)
        if occasion is None:
            self.close_stages()
            return
        self._links.commit(accepted, self._tree)
        self.strategy.verified(self._view(), self._links.tips)
        self._grow(occasion)

    def _plant(self, verdict: Verdict) -> int:
        position = len(self.prompt) + len(self.output) - 1
        self.tally.rounds += 1
        return self._tree.plant(verdict.tokens[-1], position, verdict.accepted[-1])

    def _forget_pruned(self, *, miss: bool) -> None:
        """Free what a verdict made void: flights, waiting segments and answers."""
        self._exhausted = False
        if miss:
            self._flights.clear()
            self._waiting.clear()
            self._owed = self.strategy.capacity if self._pace.markers else 0
            return
        nodes = self._tree.nodes.keys()
        self._flights.keep(nodes, emptied=self._pace.markers)
        waiting = ([node for node in segment if node in nodes] for segment in self._waiting)
        self._waiting = deque(segment for segment in waiting if segment)

    # ---- growth ----------------------------------------------------------------------------------

    def _grow(self, occasion: Occasion) -> None:
        if occasion is Occasion.VERDICT:
            self._take_grown(self.drafting.harvest(self._tree))
        growth = self.strategy.grow(self._view(), occasion)
        self.drafting.begin(growth, idle=occasion is Occasion.IDLE, drafter=self.strategy.drafter)
        if occasion is Occasion.ROUND and (growth is None or self.strategy.ahead):
            self._waiting.append([self._tree.root])

    def settle(self, now: float) -> None:
        """Send what may be sent and carry growths on, until something has to be drafted or
        answered.
        """
        self._now = now
        while not self.closing:
            self._send_waiting()
            if not self.drafting.growing:
                if not self._may_grow():
                    break
                self._grow(Occasion.IDLE)
                self._exhausted = not self.drafting.growing
            elif self.drafting.wants(self._tree) or (self.strategy.ahead and not self._room()):
                break
            else:
                segments = self.drafting.collect(self._tree)
                self._exhausted = not segments and self.drafting.was_idle
                self._take_grown(segments)
        if not self.closing:
            self._links.feed(self.strategy, self._view())
            self._report_drafted()

    def _report_drafted(self) -> None:
        """Timesteps: the drafter's share of this one is done."""
        if (
            self._drafting_owed
            and isinstance(self._pace, Timestep)
            and not self.drafting.wants(self._tree)
        ):
            self._drafting_owed = False
            self.out.complete((self._pace.drafted,))

    def _take_grown(self, segments: list[list[int]]) -> None:
        for segment in segments:
            if len(segment) > self.limits.tree_rows:
                raise JobError(
                    f"a segment has {len(segment)} rows; the pipeline holds {self.limits.tree_rows}"
                )
            self._tree.select(segment)
            self._waiting.append(segment)

    def _may_grow(self) -> bool:
        planted = self.tally.rounds > 0 and not self._waiting and not self._exhausted
        return planted and not self._pace.markers and (self.strategy.ahead or self._room())

    def _room(self) -> bool:
        """A segment that is ready now could leave now."""
        if self._pace.barrier:
            return self._slot and not self._waiting
        return len(self._flights) < self.strategy.capacity and not self._waiting

    def _send_waiting(self) -> None:
        while self._waiting and self._may_send(self._waiting[0]):
            self._send_tree_segment(self._waiting.popleft())
        if self._owed and not self._waiting and not self.drafting.growing:
            self._send_tree_segment([])  # a bubble: the stages still count the step

    def _may_send(self, segment: list[int]) -> bool:
        if len(self._flights.sent) + len(segment) > self.limits.tree_rows:
            return False
        if self._pace.markers:
            return self._owed > 0
        return self._slot if self._pace.barrier else len(self._flights) < self.strategy.capacity

    def _send_tree_segment(self, ids: list[int]) -> None:
        hops = self._pace.hops()
        first = hops[0] if hops else None
        segment = self.out.segment(
            self.tally.rounds,
            [self._tree[node] for node in ids],
            marker=self._pace.markers,
            task=first.task if first and self._pace.barrier else "",
            route=hops[1:],
        )
        self._flights.launch(segment.segment, ids, self._now)
        if isinstance(self._pace, Timestep):
            self._pace.entered(segment.segment)
        self._owed = max(0, self._owed - 1)
        self._slot = False
        self.tally.segments += bool(ids)
        self.out.send(self.out.stages[0], segment, first)

    def close_stages(self) -> None:
        """Tell every worker that holds rows that the job is over."""
        self.out.tell((*self.out.stages, *self._links.nodes), Close(self.job, self.epoch))
