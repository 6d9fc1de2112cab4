"""Synchronous growth: the root and a chain of the best candidates below it, as one segment."""

from __future__ import annotations

import math

from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.tree.tree import Tree

#: Most candidates of a segment: with the root, a power of two.
MOST_CANDIDATES = 7


class SynchronousGrowth(PathGrowth):
    """A chain that goes on while its next candidate is worth a row, and the drafter's pass.

    ``row``, ``draft``: tokens that the job makes while a further row passes the stages, and during
    a pass of the drafter. The pass at the root is made in any case: whether drafting pays is not
    decided here. One behind a candidate is made if it promises more tokens than both cost: the next
    candidate counts as no less certain, given this one, than this one was.
    """

    def __init__(self, tree: Tree, row: float, draft: float) -> None:
        least = math.log(row) if row > 0 else -math.inf
        super().__init__(tree, tree.root, MOST_CANDIDATES, _with_root, least)
        self._needed = row + draft

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        asked = super().proceed(tree)
        if self.tip == tree.root:
            return asked
        tip = tree[self.tip]
        promised = math.exp(tip.score - tree[tree.root].score + tip.value)
        return asked if promised > self._needed else ()


def _with_root(tree: Tree, path: list[int]) -> list[list[int]]:
    return [[tree.root, *path]]
