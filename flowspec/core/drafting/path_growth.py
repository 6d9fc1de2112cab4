"""Growing a tree along one path, one token after the other: what chains of tokens draft."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.core.tree.tree import Tree


class PathGrowth:
    """The best child of the best child, from ``tip`` on, ``length`` nodes beyond it at most.

    ``finish`` names the segments from the path's nodes; it is asked with what there is. A node
    whose score since ``tip`` is below ``least`` ends the path: it is not worth a row.
    """

    def __init__(
        self,
        tree: Tree,
        tip: int,
        length: int,
        finish: Callable[[Tree, list[int]], list[list[int]]],
        least: float = float("-inf"),
    ) -> None:
        self.tip = tip
        self._end = tree[tip].depth + length
        self._finish = finish
        self._floor = tree[tip].score + least
        self._nodes: list[int] = []

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """The path's end, until the path is as long as it may be."""
        while tree[self.tip].depth < self._end:
            expansion = tree[self.tip].expansion
            if expansion is None:
                return (self.tip,)
            if not expansion.tokens or tree[self.tip].score + expansion.values[0] < self._floor:
                break
            self.tip = tree.add(self.tip, expansion.tokens[0], expansion.values[0])
            self._nodes.append(self.tip)
        return ()

    def segments(self, tree: Tree) -> list[list[int]]:
        """What ``finish`` makes of the path so far."""
        return self._finish(tree, self._nodes)

    def rebase(self, tree: Tree) -> None:
        """Keep what lies below the new root."""
        self._nodes = [node for node in self._nodes if node in tree]
        if self.tip not in tree:
            self.tip = tree.root

    def adopt(self, tree: Tree, tip: int) -> None:
        """Go on from ``tip``: another model has had its say."""
        if self.tip not in tree or tip not in tree.path(self.tip):
            self.tip = tip
            self._nodes = []
