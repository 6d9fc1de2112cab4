"""Synchronous growth: the root and a chain of the best candidates below it, as one segment."""

from __future__ import annotations

import math
from collections.abc import Callable

from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.tree.tree import Tree

#: Most candidates of a segment: with the root, a power of two.
MOST_CANDIDATES = 7


class SynchronousGrowth(PathGrowth):
    """A chain that goes on while its next candidate is worth a row, and the drafter's pass.

    ``cost(rows)``, ``draft``: tokens that the job makes while a segment of ``rows`` rows passes the
    stages, and during a pass of the drafter. The pass at the root is made in any case: whether
    drafting pays is not decided here. One behind a candidate is made if it promises more tokens
    than both cost: the next candidate counts as no less certain, given this one, than this one was.
    """

    def __init__(self, tree: Tree, cost: Callable[[int], float], draft: float) -> None:
        super().__init__(tree, tree.root, MOST_CANDIDATES, _with_root)
        self._cost = cost
        self._draft = draft

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        start = tree[tree.root].score
        while (rows := 1 + len(self._nodes)) <= MOST_CANDIDATES:
            tip = tree[self.tip]
            row = self._cost(rows + 1) - self._cost(rows)
            if tip.expansion is None:
                promised = math.exp(tip.score - start + tip.value)
                asked = self.tip == tree.root or promised > row + self._draft
                return (self.tip,) if asked else ()
            best = next(zip(tip.expansion.tokens, tip.expansion.values, strict=True), None)
            if best is None or math.exp(tip.score - start + best[1]) < row:
                break
            self.tip = tree.add(self.tip, *best)
            self._nodes.append(self.tip)
        return ()


def _with_root(tree: Tree, path: list[int]) -> list[list[int]]:
    return [[tree.root, *path]]
