"""What grows a token tree, as its session drives it."""

from __future__ import annotations

from typing import Protocol

from flowspec.core.tree.tree import Tree


class Growth(Protocol):
    """One growing of the tree, by whatever rule."""

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """Nodes whose expansions are needed before it can go on; empty when it is grown."""
        ...

    def segments(self, tree: Tree) -> list[list[int]]:
        """What to send, in order: nodes not in T before, each after its parent. Asked once, at the
        end, or earlier when a verdict overtakes the growth; then it gives what it has.
        """
        ...

    def rebase(self, tree: Tree) -> None:
        """The root moved within the tree: forget what is no longer below it."""
        ...
