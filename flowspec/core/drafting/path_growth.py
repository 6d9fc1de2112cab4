"""Growing a tree along one path, one token after another, as strategies that draft chains do."""

from __future__ import annotations

from collections.abc import Callable

from flowspec.core.tree.tree import Tree


class PathGrowth:
    """From ``tip`` on, repeatedly the best child: a path of at most ``length`` nodes.

    ``finish`` turns the path's nodes into segments. The path ends before a node whose score,
    relative to ``tip``, is below ``least``: its acceptance is too unlikely to spend a row on. With
    ``keeps_last`` it ends behind that node, which has been drafted: what is not spent is the
    drafter's next pass.
    """

    def __init__(
        self,
        tree: Tree,
        tip: int,
        length: int,
        finish: Callable[[Tree, list[int]], list[list[int]]],
        least: float = float("-inf"),
        *,
        keeps_last: bool = False,
    ) -> None:
        self.tip = tip
        self._end = tree[tip].depth + length
        self._finish = finish
        self._floor = tree[tip].score + least
        self._keeps_last = keeps_last
        self._nodes: list[int] = []

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """The path's last node, until the path has its full length."""
        while tree[self.tip].depth < self._end and tree[self.tip].score >= self._floor:
            expansion = tree[self.tip].expansion
            if expansion is None:
                return (self.tip,)
            if not expansion.tokens:
                break
            score = tree[self.tip].score + expansion.values[0]
            if score < self._floor and not self._keeps_last:
                break
            self.tip = tree.add(self.tip, expansion.tokens[0], expansion.values[0])
            self._nodes.append(self.tip)
        return ()

    def segments(self, tree: Tree) -> list[list[int]]:
        """The segments ``finish`` makes of the path so far."""
        return self._finish(tree, self._nodes)

    def rebase(self, tree: Tree) -> None:
        """Keep the nodes that are still in the tree; the new root may be one of them."""
        self._nodes = [node for node in self._nodes if node in tree]
        if self.tip not in tree:
            self.tip = tree.root

    def adopt(self, tree: Tree, tip: int) -> None:
        """Continue from ``tip``, the end of a middle model's text, unless the path contains it."""
        if self.tip not in tree or tip not in tree.path(self.tip):
            self.tip = tip
            self._nodes = []
