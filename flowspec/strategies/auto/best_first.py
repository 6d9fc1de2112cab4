"""Best-first growth: the rows most likely to be committed are sent first, at any depth.

A segment consists of the best unsent nodes, as many of them as add more expected tokens than they
cost. A node's value is the product of acceptance probabilities along its path: the number of
tokens that its row is expected to commit. The choice therefore maximises the expected tokens per
segment. A child's value never exceeds its parent's, so the best nodes are found from the root
down, and the drafter is asked only about nodes whose children could be among them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

from flowspec.core.drafting.layered_growth import missing
from flowspec.core.tree.tree import Node, Tree

#: Expected tokens below which a segment is not sent: it may still occupy a stage when the next root
#: arrives, and with eight stages that delay costs more than 0.01 tokens gain.
LEAST_TOKENS = 0.01


class BestFirstGrowth:
    """Up to ``rows`` of the best unsent nodes as one segment.

    The drafter makes at most ``passes`` passes over ``batch`` nodes each, which bounds how long a
    free slot waits for a better choice; a verdict may end the growth sooner. ``price(rows)``:
    expected tokens that a segment of ``rows`` rows has to add; None: all ``rows`` are sent.
    """

    def __init__(
        self, rows: int, batch: int, passes: int, price: Callable[[int], float] | None = None
    ) -> None:
        self._rows = rows
        self._batch = batch
        self._passes = passes
        self._price = cache(price) if price is not None else None  # constant during a growth
        self._asked: tuple[int, ...] = ()

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """The batch being drafted, or the next: best nodes whose children may be among the rows."""
        if self._asked:
            left = missing(tree, self._asked)
            if left:
                return left
            self._asked = ()
            self._passes -= 1
        if self._passes <= 0:
            return ()
        best, leaves = self._best(tree)
        paying = best[: self._paying_rows(tree, best)]
        if len(paying) == self._rows or len(paying) < len(best):
            least = (
                tree[paying[-1]].score if paying else tree[tree.root].score + math.log(LEAST_TOKENS)
            )
            leaves = [leaf for leaf in leaves if tree[leaf].score > least]
        leaves.sort(key=lambda leaf: (-tree[leaf].score, leaf))
        self._asked = tuple(sorted(leaves[: self._batch]))
        return self._asked

    def segments(self, tree: Tree) -> list[list[int]]:
        """One segment of the best nodes known; none if no unsent node adds more than it costs."""
        best, _ = self._best(tree)
        paying = self._paying_rows(tree, best)
        return [sorted(best[:paying])] if paying else []

    def rebase(self, tree: Tree) -> None:
        """Drop nodes of the batch that were pruned."""
        self._asked = tuple(node for node in self._asked if node in tree)

    def _paying_rows(self, tree: Tree, best: list[int]) -> int:
        """How many of ``best`` give the largest gain, expected tokens less price; 0: no gain."""
        if self._price is None:
            return len(best)
        nodes = tree.nodes
        start = nodes[tree.root].score
        tokens = 0.0
        most = -math.inf
        paying = 0
        added = 0.0
        for rows, node in enumerate(best, 1):
            tokens += math.exp(nodes[node].score - start)
            gain = tokens - self._price(rows)
            if gain > most:
                most = gain
                paying = rows
                added = tokens
        return paying if added >= LEAST_TOKENS else 0

    def _best(self, tree: Tree) -> tuple[list[int], list[int]]:
        """The best unsent nodes, best first, and the undrafted leaves among them and T."""
        heap: list[tuple[float, int, int]] = []  # (-score of a candidate, its parent, its rank)
        leaves = []

        def offer(parent: Node, rank: int) -> None:
            expansion = parent.expansion
            if expansion is None:
                leaves.append(parent.id)
            elif rank < len(expansion.tokens):
                heapq.heappush(heap, (-parent.score - expansion.values[rank], parent.id, rank))

        nodes = tree.nodes
        for known in tree.selected():
            offer(known, 0)
        best: list[int] = []
        while heap and len(best) < self._rows:
            _, drafted, rank = heapq.heappop(heap)
            parent = nodes[drafted]
            offer(parent, rank + 1)
            expansion = parent.expansion
            assert expansion is not None
            node = nodes[tree.add(drafted, expansion.tokens[rank], expansion.values[rank])]
            if not node.selected:
                best.append(node.id)
                offer(node, 0)
        return best, leaves
