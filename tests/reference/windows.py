"""The chain: windows of the drafter's best continuation, several in flight.

The drafter works one window ahead of the slots. A token of the target that was drafted and not
sent becomes the root, and keeps its continuation.
"""

from __future__ import annotations

import math

from tests.reference.cases import Case, Commits, Options
from tests.reference.slots import FreeRunning, Slots
from tests.reference.tree import Node, Verdict, judge, live


def commits(case: Case, options: Options) -> Commits:
    return Chain(case, options).commits()


class Window:
    """A path of at most ``length`` tokens below ``tip``."""

    def __init__(self, tip: Node, length: int, confidence: int) -> None:
        self._length, self._floor = length, math.log(confidence / 100) if confidence else -math.inf
        self._above, self._tip = tip.score, tip
        self.path: list[Node] = []
        self._ended = False

    def wanted(self) -> list[Node]:
        while len(self.path) < self._length and not self._ended:
            if self._tip.candidates is None:
                return [self._tip]
            self._extend(self._tip.candidates[:1])
        return []

    def _extend(self, candidates: tuple[tuple[int, float], ...]) -> None:
        self._ended = True
        for token, value in candidates:
            if self._tip.score + value - self._above >= self._floor:
                self._tip = self._tip.child(token, value)
                self.path.append(self._tip)
                self._ended = False


class Chain(FreeRunning):
    """The slots and the path of the chain."""

    def __init__(self, case: Case, options: Options) -> None:
        super().__init__(case)
        self._window = int(options["window"])
        self._confidence = int(options.get("confidence", 0))
        self._slots = Slots(int(options["in_flight"]))
        self._barren = False
        self._tip = self.root

    def begin_round(self) -> None:
        self._slots.clear()
        self._barren = False
        self._tip = self.root
        self.wait([self.root])

    def verdict(self) -> Verdict | None:
        return judge(self.case, self.root, drafted=True)

    def root_moved(self) -> None:
        self._barren = False
        self._slots.prune(self.root)
        if isinstance(self.growth, Window):
            self._take(live(self.growth.path, self.root))
        self.growth = None

    def _take(self, rows: list[Node]) -> None:
        self.wait(rows)
        self._tip = rows[-1] if rows else self._tip

    def growth_done(self) -> None:
        assert isinstance(self.growth, Window)
        self._barren = not self.growth.path
        self._take(self.growth.path)
        self.growth = None

    def follow_up(self) -> bool:
        if self.waiting or self._barren:
            return False
        self.growth = Window(self._tip, self._window, self._confidence)
        return True
