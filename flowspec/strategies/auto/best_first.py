"""Best-first growth: the rows most likely to be committed are sent first, at any depth.

A segment consists of the best unsent nodes, as many of them as add more expected tokens than they
cost. A node's value is the product of acceptance probabilities along its path: the number of
tokens that its row is expected to commit. The choice therefore maximises the expected tokens per
segment. A child's value never exceeds its parent's, so the best nodes are found from the root
down, and the drafter is asked only about nodes whose children could be among them.

Where a second row does not pay, a segment is a lone row. It continues the chain in flight, the best
child of the deepest node, unless another row is several times as probable: an alternative to a row
in flight loses its worth when that row is answered, while the chain's next row gains by it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

from flowspec.core.drafting.layered_growth import missing
from flowspec.core.tree.tree import Node, Tree

#: Segment sizes to choose among, in rows. A pass of such a size is measured exactly, so that a jump
#: of its time (a kernel's tile) is seen where it is.
SIZES = frozenset(1 << exponent for exponent in range(9))
#: How many times as probable as the chain's next row another must be to be sent alone before it.
#: Fitted on the tuning prompts, with one-row segments (`ops/bench/archive/auto-constants.md`).
ALTERNATIVE = 3.0
#: Expected tokens below which a segment is not sent: it may still occupy a stage when the next root
#: arrives, and with eight stages that delay costs more than 0.01 tokens gain.
LEAST_TOKENS = 0.01


class BestFirstGrowth:
    """Up to ``rows`` of the best unsent nodes as one segment, or the chain's next node.

    The drafter makes at most ``passes`` passes over ``batch`` nodes each, which bounds how long a
    free slot waits for a better choice; a verdict may end the growth sooner. ``price(rows)``:
    expected tokens that a segment of ``rows`` rows has to add; None: all ``rows`` are sent.
    ``alternative``: as ``ALTERNATIVE``.
    """

    #: Sizes to choose among.
    sizes = SIZES
    #: The gain, in tokens, that a choice has to exceed: a free slot takes a row at any price.
    least_gain = -math.inf

    def __init__(
        self,
        rows: int,
        batch: int,
        passes: int,
        price: Callable[[int], float] | None = None,
        alternative: float = ALTERNATIVE,
    ) -> None:
        self._rows = rows
        self._batch = batch
        self._passes = passes
        self._price = cache(price) if price is not None else None  # constant during a growth
        self._alternative = alternative
        self._asked: tuple[int, ...] = ()
        self._joined = False

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """The batch being drafted, or the next: best nodes whose children may be among the rows."""
        if self._asked:
            left = missing(tree, self._asked)
            if len(left) == len(self._asked):
                return left
            self._count_pass(complete=not left)
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
        if not self._asked and len(paying) == 1:
            self._asked = self._for_lone_row(tree)
        return self._asked

    def segments(self, tree: Tree) -> list[list[int]]:
        """One segment of the best nodes known; none if no unsent node adds more than it costs."""
        best, _ = self._best(tree)
        paying = best[: self._paying_rows(tree, best)]
        if len(paying) == 1:
            paying = [self._lone_row(tree, paying[0])]
        return [sorted(paying)] if paying else []

    def rebase(self, tree: Tree) -> None:
        """Drop nodes of the batch that were pruned."""
        self._asked = tuple(node for node in self._asked if node in tree)

    def _count_pass(self, *, complete: bool) -> None:
        """A pass over the batch has ended, ``complete`` or over a part of it.

        A pass over a part was in progress when the growth began: the batch contains its nodes and
        others. The others are chosen anew, or the drafter would spend a pass on alternatives while
        the children it has just proposed wait. Such a pass is not counted: it cost no time of the
        growth's own.
        """
        self._asked = ()
        if complete or self._joined:
            self._passes -= 1
        self._joined = True

    def _paying_rows(self, tree: Tree, best: list[int]) -> int:
        """How many of ``best`` give the largest gain, expected tokens less price; 0: no gain."""
        if self._price is None:
            return len(best)
        nodes = tree.nodes
        start = nodes[tree.root].score
        tokens = 0.0
        most = self.least_gain
        paying = 0
        added = 0.0
        for rows, node in enumerate(best, 1):
            tokens += math.exp(nodes[node].score - start)
            if rows not in self.sizes and rows < len(best):
                continue
            gain = tokens - self._price(rows)
            if gain > most:
                most = gain
                paying = rows
                added = tokens
        return paying if added >= LEAST_TOKENS else 0

    def _for_lone_row(self, tree: Tree) -> tuple[int, ...]:
        """What has to be drafted before a lone row can be chosen."""
        return missing(tree, [_tip(tree).id])

    def _lone_row(self, tree: Tree, best: int) -> int:
        """The best child of the tip, or ``best`` if that is much more probable."""
        tip = _tip(tree)
        if tip.expansion is None or not tip.expansion.tokens:
            return best
        value = tip.expansion.values[0]
        if tree[best].score > tip.score + value + math.log(self._alternative):
            return best
        return tree.add(tip.id, tip.expansion.tokens[0], value)

    def _known(self, tree: Tree) -> list[Node]:
        """The nodes whose children can be sent."""
        return tree.selected()

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
        for known in self._known(tree):
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


def _tip(tree: Tree) -> Node:
    """The deepest node of T, the most probable of several."""
    return max(tree.selected(), key=lambda node: (node.depth, node.score, -node.id))
