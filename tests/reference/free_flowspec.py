"""FlowSpec with free-running stages: no stage waits for a verdict.

At most N + 1 segments are in flight; a slot frees when an answer comes, and as soon as a verdict
leaves a segment without live rows. A verdict begins a context-aware merge; while a slot is free
and nothing else is to be done, score-aware expansions follow one another. One that finds nothing
is not repeated before the next commit.
"""

from __future__ import annotations

from tests.reference.cases import Case, Commits, Options
from tests.reference.flowspec import EXPANSION, TREE, FlowSpec, Settings
from tests.reference.slots import FreeRunning, Slots


def commits(case: Case, options: Options) -> Commits:
    return FreeFlowSpec(case, Settings.of(options)).commits()


def pruned(case: Case, options: Options) -> Commits:
    """FlowSpec's ablation: a round's tree is pruned in flight, and nothing is added to it."""
    return FreeFlowSpec(case, Settings.of(options, additions=False)).commits()


class FreeFlowSpec(FreeRunning, FlowSpec):
    """The slots of free-running FlowSpec."""

    def __init__(self, case: Case, settings: Settings) -> None:
        super().__init__(case, settings)
        self._slots = Slots(len(self.stages) + 1)
        self._barren = False

    def begin_round(self) -> None:
        self._slots.clear()
        self._barren = False
        self.grow_beam(TREE, self.settings.loops)

    def root_moved(self) -> None:
        self._barren = False
        self._slots.prune(self.root)
        super().root_moved()

    def growth_done(self) -> None:
        before = len(self.waiting)
        super().growth_done()
        self._barren = self.kind == EXPANSION and len(self.waiting) == before

    def follow_up(self) -> bool:
        if not self.settings.expand or self._barren or self.waiting or not self._slots.free:
            return False
        self.grow_expansion()
        return True
