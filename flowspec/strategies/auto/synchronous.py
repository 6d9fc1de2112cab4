"""Synchronous growth: the root and a chain of the best candidates below it, as one segment."""

from __future__ import annotations

import math
from collections.abc import Callable

from flowspec.core.tree.tree import Tree

#: Most candidates of a segment: with the root, a power of two.
MOST_CANDIDATES = 7


class SynchronousGrowth:
    """A chain that goes on while its next candidate is worth a row, and the drafter's pass.

    ``cost(rows)``, ``draft``: tokens that the job makes while a segment of ``rows`` rows passes all
    stages and links, and during a pass of the drafter. The pass at the root is made in any case:
    whether drafting pays is not decided here. One behind a candidate is made if it promises more
    tokens than both cost: the next candidate counts as no less certain, given this one, than this
    one was.
    """

    def __init__(self, cost: Callable[[int], float], draft: float) -> None:
        self._cost = cost
        self._draft = draft
        self._chain: list[int] = []

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        start = tree[tree.root].score
        while (rows := 1 + len(self._chain)) <= MOST_CANDIDATES:
            tip = tree[self._chain[-1] if self._chain else tree.root]
            row = self._cost(rows + 1) - self._cost(rows)
            if tip.expansion is None:
                promised = math.exp(tip.score - start + tip.value)
                asked = not self._chain or promised > row + self._draft
                return (tip.id,) if asked else ()
            best = next(zip(tip.expansion.tokens, tip.expansion.values, strict=True), None)
            if best is None or math.exp(tip.score - start + best[1]) < row:
                break
            self._chain.append(tree.add(tip.id, *best))
        return ()

    def segments(self, tree: Tree) -> list[list[int]]:
        return [[tree.root, *self._chain]]

    def rebase(self, tree: Tree) -> None:
        self._chain = [node for node in self._chain if node in tree and node != tree.root]
