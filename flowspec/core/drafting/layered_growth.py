"""Growing a tree layer by layer.

``LayerGrowth`` appends whole layers of bounded width (PipeDec, SpecPipe:
docs/algorithms.md#layers), ``StaticGrowth`` grows a tree of fixed shape (SpecInfer:
docs/algorithms.md#static-tree). Both are a ``core.drafting.growth.Growth``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowspec.core.tree.tree import Tree


def deepest(tree: Tree) -> list[int]:
    """T's deepest nodes, in the order of their parents: the bottom layer of PipeDec's arrays."""
    depth = -1
    found: list[int] = []
    for node in tree.selected():
        if node.depth > depth:
            depth = node.depth
            found = []
        if node.depth == depth:
            found.append(node.id)
    return sorted(found)


def missing(tree: Tree, nodes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``nodes`` without an expansion."""
    return tuple(node for node in nodes if tree[node].expansion is None)


def add_layer(tree: Tree, above: Sequence[int], children: int, width: int) -> list[int]:
    """Add the ``width`` best candidates below ``above`` to the tree; their node ids.

    Each node of ``above`` contributes its ``children`` best candidates; the layer keeps the best
    by cumulative score, ties to the earlier parent and the earlier candidate. The ids are grouped
    by parent, as PipeDec's arrays need them (docs/algorithms.md#layers).
    """
    scores: list[float] = []
    firsts = []  # where a parent's candidates begin in scores
    drafted = []
    for parent in above:
        node = tree.nodes[parent]
        if node.expansion is not None:
            firsts.append(len(scores))
            drafted.append((parent, node.expansion))
            scores += [node.score + value for value in node.expansion.values[:children]]
    best = np.sort(np.argsort(-np.array(scores), kind="stable")[:width])
    owners = np.searchsorted(firsts, best, side="right") - 1
    layer = []
    for entry, owner in zip(best.tolist(), owners.tolist(), strict=True):
        parent, expansion = drafted[owner]
        rank = entry - firsts[owner]
        layer.append(tree.add(parent, expansion.tokens[rank], expansion.values[rank]))
    return layer


class LayerGrowth:
    """``levels`` layers below the bottom layer as one segment: at most ``width`` nodes per layer,
    chosen from ``children`` candidates per node.

    The last layer is chosen only when the segment is asked for: PipeDec drafts before the prune
    and selects after it, so that pruned nodes take no part of the width. After a prune the bottom
    layer is the deepest that survived, and keeps the expansions it has.
    """

    def __init__(self, tree: Tree, width: int, children: int, levels: int = 1) -> None:
        self._width = width
        self._children = children
        self._levels = levels
        self._start(tree)

    def _start(self, tree: Tree) -> None:
        self._grown: list[int] = []
        self._bottom = deepest(tree)
        self._left = self._levels

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """Nodes of the bottom layer without an expansion."""
        while self._left > 1 and self._bottom and not missing(tree, self._bottom):
            self._bottom = add_layer(tree, self._bottom, self._children, self._width)
            self._grown += self._bottom
            self._left -= 1
        return missing(tree, self._bottom)

    def segments(self, tree: Tree) -> list[list[int]]:
        """One segment; none while nodes are pending."""
        if self.proceed(tree):
            return []
        layer = add_layer(tree, self._bottom, self._children, self._width) if self._bottom else []
        grown = [*self._grown, *layer]
        return [grown] if grown else []

    def rebase(self, tree: Tree) -> None:
        """Begin again below the deepest layer that survived the prune."""
        self._start(tree)


class StaticGrowth:
    """A tree of fixed shape as one segment, root included: every node of level i gets
    ``branching[i]`` children.
    """

    def __init__(self, tree: Tree, branching: Sequence[int]) -> None:
        self._branching = list(branching)
        self._nodes = [tree.root]
        self._bottom = [tree.root]

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """Nodes of the current level without an expansion."""
        while self._branching and self._bottom:
            wanted = missing(tree, self._bottom)
            if wanted:
                return wanted
            children = self._branching.pop(0)
            self._bottom = add_layer(tree, self._bottom, children, children * len(self._bottom))
            self._nodes += self._bottom
        return ()

    def segments(self, tree: Tree) -> list[list[int]]:
        """The root and all levels as one segment."""
        return [self._nodes]

    def rebase(self, tree: Tree) -> None:
        """Nothing: a static tree is verified as a whole, so no prune falls within a round."""
