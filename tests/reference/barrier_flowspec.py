"""FlowSpec with the papers' barrier: a step of the pipeline begins with the verdict before it.

Stage k computes segment i of a round in step i + k - 1, and a step s >= N begins only after
verdict s - N. D0 counts what it has yet to send:

1. Every answer is judged when it comes, whatever the drafter does.
2. N + 1 segments are due at the beginning of a round, all of them to be filled by its tree. Every
   answer makes one more due.
3. Each empty answer adds one pending score-aware expansion. It begins when the growth under way is
   complete and its segment was handed on; pending expansions are done one after another. With
   expansions off its turn comes in the same way, and brings nothing: D0 of the paper sends what
   follows a verdict before it takes the next answer.
4. A due segment is one that waits, or that of the growth under way or of a pending expansion; what
   is due beyond those leaves at once as an empty segment, if nothing waits.
5. A verdict that moves the root within the tree overtakes the growth: what was found is its
   segment. Pending expansions are dropped, and the merge begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.reference.cases import Case, Commits, Options
from tests.reference.engine import Segment, Stage
from tests.reference.flowspec import TREE, FlowSpec, Settings
from tests.reference.tree import Verdict, selected_below


def commits(case: Case, options: Options) -> Commits:
    return BarrierFlowSpec(case, Settings.of(options)).commits()


def pruned(case: Case, options: Options) -> Commits:
    """FlowSpec's ablation: a round's tree is pruned in flight, and nothing is added to it."""
    return BarrierFlowSpec(case, Settings.of(options, additions=False)).commits()


def naive(case: Case, options: Options) -> Commits:
    """The naive pipeline behind the barrier: judged when nothing is on its way."""
    return BarrierNaive(case, Settings.of(options, additions=False)).commits()


class BarrierFlowSpec(FlowSpec):
    """Steps, due segments and pending expansions."""

    def __init__(self, case: Case, settings: Settings) -> None:
        super().__init__(case, settings)
        self._held: list[tuple[int, Callable[[], None]]] = []  # hops, by the verdict they wait for
        self._verdicts = 0
        self._due = 0
        self._pending = 0

    def begin_round(self) -> None:
        self._held, self._verdicts = [], 0
        self._due, self._pending = len(self.stages) + 1, 0
        self.grow_beam(TREE, self.settings.loops)

    def root_moved(self) -> None:
        self._pending = 0
        super().root_moved()

    def answer_came(self, segment: Segment) -> None:
        self._verdicts += 1
        self._due += 1
        if not segment.rows:
            self._pending += 1

    def judged(self, verdict: Verdict | None) -> None:
        if verdict is not None and verdict.missed:
            return
        held, self._held = self._held, []
        for awaited, go in held:
            self._release(awaited, go)

    # The way of a segment.

    def hop(self, segment: Segment, stage: Stage) -> None:
        """The hop of segment i to stage k waits for verdict i + k - 1 - N."""
        awaited = segment.index + stage.number - 1 - len(self.stages)
        if segment.round == self.round:
            self._release(awaited, partial(super().hop, segment, stage))

    def _release(self, awaited: int, go: Callable[[], None]) -> None:
        if awaited < self._verdicts:
            go()
        else:
            self._held.append((awaited, go))

    def emptied(self, segment: Segment, stage: Stage) -> None:
        """An empty segment goes on and takes no time."""
        self.pass_on(segment, stage)

    # What leaves D0.

    def send_what_waits(self) -> None:
        while self.waiting and self._due:
            self._due -= 1
            self.send(self.waiting.pop(0))
        if self.growth is not None and self.kind == TREE:
            return
        promised = (self.growth is not None) + self._pending
        while not self.waiting and self._due > promised:
            self._due -= 1
            self.send([])

    def follow_up(self) -> bool:
        if not self._pending:
            return False
        self._pending -= 1
        if self.settings.expand:
            self.grow_expansion()
        return True


class BarrierNaive(BarrierFlowSpec):
    """A verdict waits for the answers of all nodes."""

    def verdict(self) -> Verdict | None:
        tree = selected_below(self.root)
        return super().verdict() if all(node.answered for node in tree) else None
