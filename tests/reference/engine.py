"""A virtual clock, the stages of a pipeline, and what all event-driven systems do at D0."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.reference.cases import Case, Commits
from tests.reference.growth import Growth
from tests.reference.tree import Node, Verdict, first_root, judge, live

#: Order of the events of one moment.
RESULT, MESSAGE, START = range(3)


class Clock:
    """Events by time, kind and order of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, kind: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, kind, next(self._count), action))

    def run(self) -> None:
        while self._events:
            self.now, _, _, action = heapq.heappop(self._events)
            action()


@dataclass(eq=False, slots=True)
class Segment:
    """Rows on their way; ``index`` counts the segments of a round from 0."""

    rows: list[Node]
    round: int
    index: int


@dataclass(slots=True)
class Stage:
    """One stage: what waits for it, and the newest root it has heard of."""

    number: int
    queue: list[Segment] = field(default_factory=list)
    busy: bool = False
    root: Node | None = None


class Decoder:
    """D0 and its pipeline. A system says how to grow the tree and when segments leave.

    Stages run free: a segment is computed when its stage is free, and one without live rows is
    dropped. A further system may override what happens to those, and the way of a hop.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.costs = case, case.costs
        self.clock = Clock()
        self.stages = [Stage(number) for number in range(1, len(case.costs.stages) + 1)]
        self.root = first_root(case)
        self.round = 0
        self.sent = 0  # segments of this round
        self.waiting: list[list[Node]] = []
        self.growth: Growth | None = None
        self.drafting = False
        self.over = False
        self._charged: Growth | None = None
        self._record: Commits = []

    def commits(self) -> Commits:
        links = (len(self.stages) + 1) * self.costs.link
        self.clock.after(sum(self.costs.stages) + links, MESSAGE, self._begin)
        self.clock.run()
        assert sum(tokens for _, tokens in self._record) == self.case.budget
        return self._record

    # What a system defines.

    def begin_round(self) -> None:
        raise NotImplementedError

    def root_moved(self) -> None:
        """The root moved within the tree; a growth may be under way."""
        raise NotImplementedError

    def growth_done(self) -> None:
        """The growth wants no further pass; its segments may be taken."""
        raise NotImplementedError

    def send_what_waits(self) -> None:
        raise NotImplementedError

    def follow_up(self) -> bool:
        """No growth is under way: begin one or settle what was to follow; whether that was done."""
        return False

    def answer_came(self, segment: Segment) -> None:
        """An answer of this round, before it is judged."""

    def verdict(self) -> Verdict | None:
        return judge(self.case, self.root)

    def judged(self, verdict: Verdict | None) -> None:
        """An answer was judged; the root and all rows at D0 are up to date."""

    # Stages.

    def hop(self, segment: Segment, stage: Stage) -> None:
        """Send a segment to a stage."""
        self.clock.after(self.costs.link, MESSAGE, partial(self._queue, segment, stage))

    def emptied(self, segment: Segment, stage: Stage) -> None:
        """No row of a segment is live at a stage."""

    def pass_on(self, segment: Segment, stage: Stage) -> None:
        if stage.number < len(self.stages):
            self.hop(segment, self.stages[stage.number])
        else:
            self.clock.after(self.costs.link, MESSAGE, partial(self._answer, segment))

    def _queue(self, segment: Segment, stage: Stage) -> None:
        stage.queue.append(segment)
        self.clock.after(0, START, partial(self._work, stage))

    def _work(self, stage: Stage) -> None:
        while stage.queue and not stage.busy:
            segment = stage.queue.pop(0)
            self._prune(segment, stage)
            if segment.rows:
                stage.busy = True
                seconds = self.costs.stages[stage.number - 1]
                self.clock.after(seconds, RESULT, partial(self._computed, segment, stage))
                return
            self.emptied(segment, stage)

    def _computed(self, segment: Segment, stage: Stage) -> None:
        stage.busy = False
        self._prune(segment, stage)
        if segment.rows:
            self.pass_on(segment, stage)
        else:
            self.emptied(segment, stage)
        self.clock.after(0, START, partial(self._work, stage))

    def _prune(self, segment: Segment, stage: Stage) -> None:
        if stage.root is not None:
            segment.rows = live(segment.rows, stage.root)

    def _tell(self, stage: Stage, root: Node) -> None:
        stage.root = root

    # D0.

    def send(self, rows: list[Node]) -> Segment:
        """Let a segment leave."""
        for row in rows:
            row.selected = True
        segment = Segment(list(rows), self.round, self.sent)
        self.sent += 1
        self.hop(segment, self.stages[0])
        return segment

    def wait(self, rows: list[Node]) -> None:
        """Put nodes into the tree, to leave as a segment."""
        if rows:
            for row in rows:
                row.selected = True
            self.waiting.append(rows)

    def turn(self) -> None:
        """Carry the growth on until it waits for the drafter, and send what can leave."""
        while True:
            if self.growth is not None and not self.growth.wanted():
                self.growth_done()
            self.send_what_waits()
            if self.growth is None and self.follow_up():
                continue
            if self.growth is None or self.growth.wanted() or self.growth_holds():
                break
        self.clock.after(0, START, self._draft)

    def growth_holds(self) -> bool:
        """The growth is drafted, and waits for something else."""
        return False

    def _draft(self) -> None:
        if self.growth is None or self.drafting or self.over:
            return
        nodes, growth = self.growth.wanted(), self.growth
        if nodes:
            self.drafting = True
            free = self.costs.per_growth and growth is self._charged
            self._charged = growth
            seconds = 0.0 if free else self.costs.draft
            self.clock.after(seconds, RESULT, partial(self._drafted, nodes, growth))

    def _drafted(self, nodes: list[Node], growth: Growth) -> None:
        self.drafting = False
        for node in nodes:
            node.candidates = self.case.propose(node.path)
        if self.over:
            return
        self.turn()
        if self.growth is growth:
            self._draft()

    def _begin(self) -> None:
        self._commit(1)
        if self.case.budget > 1:
            self.begin_round()
            self.turn()

    def _answer(self, segment: Segment) -> None:
        if segment.round != self.round or self.over:
            return
        for row in segment.rows:
            row.answered = True
        self.answer_came(segment)
        verdict = self.verdict()
        if verdict is not None:
            self._apply(verdict)
        if not self.over:
            self.judged(verdict)
            self.turn()

    def _commit(self, tokens: int) -> None:
        self._record.append((self.clock.now, tokens))

    def _apply(self, verdict: Verdict) -> None:
        self._commit(verdict.tokens)
        self.over = verdict.finished
        if self.over:
            return
        self.root = verdict.root
        for stage in self.stages:
            self.clock.after(self.costs.link, MESSAGE, partial(self._tell, stage, self.root))
        if verdict.missed:
            self.round, self.sent = self.round + 1, 0
            self.waiting, self.growth = [], None
            self.begin_round()
        else:
            kept = [live(rows, self.root) for rows in self.waiting]
            self.waiting = [rows for rows in kept if rows]
            self.root_moved()
