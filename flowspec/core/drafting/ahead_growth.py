"""Drafting the trees of likely next rounds while the present tree is verified."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.drafting.layered_growth import add_layer, missing
from flowspec.core.tree.tree import Tree


class AheadGrowth:
    """Static trees below the places where the verdict on T is likely to end; nothing is sent.

    A verdict ends at a node of T whose next token is not in T. ``roots``: how many of these tokens
    to draft from, the likeliest first. ``passes``: most passes of the drafter: one expands the
    leaves of T, each further one adds a level of ``branching`` to all trees.
    Source: docs/algorithms.md#static-tree.
    """

    def __init__(self, tree: Tree, branching: Sequence[int], roots: int, passes: int) -> None:
        self._selected = [node.id for node in tree.selected()]
        self._roots = roots
        self._branching = list(branching[: passes - 1])
        self._chosen = False
        self._bottom = self._selected

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """T's leaves, then the trees' deepest nodes; those without an expansion."""
        while self._branching and self._bottom:
            wanted = missing(tree, self._bottom)
            if wanted:
                return wanted
            if self._chosen:
                children = self._branching.pop(0)
                self._bottom = add_layer(tree, self._bottom, children, children * len(self._bottom))
            else:
                self._chosen = True
                self._bottom = self._choose(tree)
        return ()

    def _choose(self, tree: Tree) -> list[int]:
        """The likeliest tokens after T, as nodes; of equals the earlier parent's, then its better.

        A token's probability to be the verdict's last one is that of its path.
        """
        found = []
        for parent in self._selected:
            node = tree[parent]
            if node.expansion is None:
                continue
            for token, value in zip(node.expansion.tokens, node.expansion.values, strict=True):
                child = tree.child(parent, token)
                if child is None or not tree[child].selected:
                    found.append((-(node.score + value), parent, token, value))
        found.sort(key=lambda candidate: candidate[0])
        return [tree.add(parent, token, value) for _, parent, token, value in found[: self._roots]]

    def segments(self, tree: Tree) -> list[list[int]]:
        """None: the trees are sent only if a verdict leads to one of them."""
        return []

    def rebase(self, tree: Tree) -> None:
        """Nothing: what was drafted below the new root stays in the tree."""
