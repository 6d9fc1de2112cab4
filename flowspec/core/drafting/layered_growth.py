"""Growing a tree layer by layer, and along one path.

``LayerGrowth`` appends whole layers of bounded width (PipeDec, SpecPipe: ``algorithms.md`` 3.2,
4.1), ``StaticGrowth`` a tree of fixed shape (SpecInfer: ``algorithms.md`` 6), ``PathGrowth`` one
token after the other (chains). All are driven like a ``core.strategy.Growth``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowspec.core.tree.tree import Tree


def deepest(tree: Tree) -> list[int]:
    """The nodes of T's deepest layer, parents' order: the bottom layer of PipeDec's arrays."""
    depth = -1
    found: list[int] = []
    for node in tree.nodes.values():
        if node.selected and node.depth >= depth:
            if node.depth > depth:
                depth = node.depth
                found = []
            found.append(node.id)
    return sorted(found)


def missing(tree: Tree, nodes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``nodes`` no drafter has answered for."""
    return tuple(node for node in nodes if tree[node].expansion is None)


def add_layer(tree: Tree, above: Sequence[int], children: int, width: int) -> list[int]:
    """The ``width`` best of ``children`` candidates of every node of ``above``, as nodes.

    Best by cumulative score; the answer is grouped by parent, as BFS arrays need it
    (``algorithms.md`` 9.16). Ties go to the earlier parent and the earlier candidate.
    """
    scores: list[float] = []
    firsts = []
    drafted = []  # where a parent's entries begin
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
    """``levels`` layers below the bottom one as one segment, ``width`` nodes each, ``children`` a
    node.

    The last layer is chosen only when the segment is asked for: a verdict that comes meanwhile
    leaves more of the width to what is valid (PipeDec draws before the prune and selects after
    it, 9.15). After a prune the bottom layer is the deepest that survived, with whatever was
    drafted for it before.
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

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """Nodes of the bottom layer that no drafter has answered for."""
        while self._left > 1 and self._bottom and not missing(tree, self._bottom):
            self._bottom = add_layer(tree, self._bottom, self._children, self._width)
            self._grown += self._bottom
            self._left -= 1
        return missing(tree, self._bottom)

    def segments(self, tree: Tree) -> list[list[int]]:
        """One segment; none while the drafter has not answered."""
        if self.pending(tree):
            return []
        layer = add_layer(tree, self._bottom, self._children, self._width) if self._bottom else []
        grown = [*self._grown, *layer]
        return [grown] if grown else []

    def rebase(self, tree: Tree) -> None:
        """Begin below the deepest layer that survived; what was drafted stays with its nodes."""
        self._start(tree)


class StaticGrowth:
    """A tree of fixed shape: every node of level i gets ``branching[i]`` children; root and tree at
    once.
    """

    def __init__(self, tree: Tree, branching: Sequence[int]) -> None:
        self._branching = list(branching)
        self._nodes = [tree.root]
        self._bottom = [tree.root]

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """Nodes of the level under way that no drafter has answered for."""
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
        """A static tree is judged as a whole: there is no prune inside a round."""
