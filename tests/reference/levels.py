"""SpecPipe: levels of fixed width that leave when they are drafted and a slot is free.

With ``levels`` above 1 a segment has several levels, each but the last chosen when its draft pass
ends; the last one is chosen when the segment leaves, after all verdicts until then. Only then are
they in the tree: a target's token among levels chosen before is a miss. A verdict begins the
segment anew below the deepest level that survives, with the candidates that are known.
"""

from __future__ import annotations

from tests.reference.cases import Case, Commits, Options
from tests.reference.growth import Levels, bottom_layer
from tests.reference.slots import FreeRunning, Slots


def commits(case: Case, options: Options) -> Commits:
    """``in_flight=0``: as many segments as stages."""
    return SpecPipe(case, options).commits()


def grouped(case: Case, options: Options) -> Commits:
    """PipeDec's layers without timesteps: as many in flight as there are groups of stages."""
    return SpecPipe(case, {**options, "in_flight": options["groups"]}).commits()


class SpecPipe(FreeRunning):
    """The slots and the levels of SpecPipe."""

    def __init__(self, case: Case, options: Options) -> None:
        super().__init__(case)
        self._width, self._children = int(options["width"]), int(options["children"])
        self._levels = int(options.get("levels", 1))
        self._slots = Slots(int(options.get("in_flight", 0)) or len(self.stages))
        self._barren = False

    def begin_round(self) -> None:
        self._slots.clear()
        self._barren = False
        self.wait([self.root])

    def root_moved(self) -> None:
        self._barren = False
        self._slots.prune(self.root)
        self.growth = None

    def growth_holds(self) -> bool:
        return bool(self.waiting) or not self._slots.free

    def growth_done(self) -> None:
        if self.growth_holds():
            return
        assert isinstance(self.growth, Levels)
        rows = self.growth.rows()
        self._barren = not rows
        self.wait(rows)
        self.growth = None

    def follow_up(self) -> bool:
        if self._barren:
            return False
        bottom = bottom_layer(self.root)
        self.growth = Levels(bottom, self._width, self._children, self._levels)
        return True
