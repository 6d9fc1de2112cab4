"""Growing a tree by value: the rows that are likeliest to be committed go first, whatever their
depth.

A segment is the best nodes that were not sent yet, as many of them as bring in more than they
cost. A child is never worth more than its parent, so the best are found from the top down, and
the drafter is asked only for nodes whose children could be among them. What a row is worth is
the product of the drafter's probabilities along its path: the expected number of tokens it
commits, so the choice is the one with the most expected tokens a segment.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

from flowspec.core.layers import missing
from flowspec.core.tree import Tree

#: Expected tokens below which a segment stays unsent: a useless one may still be in a stage's way
#: when the next root comes, and with eight stages that costs more than one use in a hundred brings.
LEAST = 0.01


class BestGrowth:
    """Up to ``rows`` of the best unsent nodes as one segment, after at most ``passes`` passes over
    ``batch`` each.

    ``price``: expected tokens that a segment of so many rows has to bring in; None: all ``rows``
    are wanted. The passes bound how long a free slot waits for a better choice; a verdict may
    ask sooner.
    """

    def __init__(
        self, rows: int, batch: int, passes: int, price: Callable[[int], float] | None = None
    ) -> None:
        self._rows = rows
        self._batch = batch
        self._passes = passes
        self._price = cache(price) if price is not None else None  # one growth, one tariff
        self._asked: tuple[int, ...] = ()

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """The batch being drafted, or the next one: the best nodes whose children could be among
        the rows.
        """
        if self._asked:
            left = missing(tree, self._asked)
            if left:
                return left
            self._asked = ()
            self._passes -= 1
        if self._passes <= 0:
            return ()
        best, leaves = self._best(tree)
        paying = best[: self._paying(tree, best)]
        if len(paying) == self._rows or len(paying) < len(best):
            least = tree[paying[-1]].score if paying else tree[tree.root].score + math.log(LEAST)
            leaves = [leaf for leaf in leaves if tree[leaf].score > least]
        leaves.sort(key=lambda leaf: (-tree[leaf].score, leaf))
        self._asked = tuple(sorted(leaves[: self._batch]))
        return self._asked

    def segments(self, tree: Tree) -> list[list[int]]:
        """One segment of what is best by now; none if nothing is known that was not sent and is
        worth it.
        """
        best, _ = self._best(tree)
        paying = self._paying(tree, best)
        return [sorted(best[:paying])] if paying else []

    def rebase(self, tree: Tree) -> None:
        """Forget what was asked for and is gone."""
        self._asked = tuple(node for node in self._asked if node in tree)

    def _paying(self, tree: Tree, best: list[int]) -> int:
        """How many of ``best`` bring in the most expected tokens over their price: one at least, or
        none at all.
        """
        if self._price is None:
            return len(best)
        start = tree[tree.root].score
        tokens = 0.0
        most = -math.inf
        paying = 0
        brought = 0.0
        for rows, node in enumerate(best, 1):
            tokens += math.exp(tree[node].score - start)
            gain = tokens - self._price(rows)
            if gain > most:
                most = gain
                paying = rows
                brought = tokens
        return paying if brought >= LEAST else 0

    def _best(self, tree: Tree) -> tuple[list[int], list[int]]:
        """The best unsent nodes, best first, and the nodes no drafter has answered for among them
        and T.
        """
        heap: list[
            tuple[float, int, int]
        ] = []  # (-score of a candidate, its parent, its rank there)
        leaves = []

        def offer(parent: int, rank: int) -> None:
            node = tree[parent]
            if node.expansion is None:
                leaves.append(parent)
            elif rank < len(node.expansion.tokens):
                heapq.heappush(heap, (-node.score - node.expansion.values[rank], parent, rank))

        for known in tree:
            if known.selected:
                offer(known.id, 0)
        best: list[int] = []
        while heap and len(best) < self._rows:
            _, parent, rank = heapq.heappop(heap)
            offer(parent, rank + 1)
            expansion = tree[parent].expansion
            assert expansion is not None
            node = tree.add(parent, expansion.tokens[rank], expansion.values[rank])
            if not tree[node].selected:
                best.append(node)
                offer(node, 0)
        return best, leaves
