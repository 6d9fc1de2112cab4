"""The interface of a growth: what adds drafted nodes to the tree of a run."""

from __future__ import annotations

from typing import Protocol

from flowspec.core.tree.tree import Tree


class Growth(Protocol):
    """One growth of the tree, driven by its session.

    The session calls ``proceed``, has the nodes that it returns expanded by the drafter, and
    repeats this until it returns none. Then it calls ``segments``.
    """

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """Add nodes as far as the known expansions allow.

        Returns the nodes that need an expansion before it can go on; empty when it is complete.
        """
        ...

    def segments(self, tree: Tree) -> list[list[int]]:
        """The segments to send, in order: lists of nodes that are not yet selected, parents first.

        In a new round the first segment begins with the root, even if nothing was drafted, unless
        the strategy's ``drafts_ahead`` is set; after that the root is never in a segment again.
        Called once: when the growth is complete, or earlier if a verdict arrives first.
        """
        ...

    def rebase(self, tree: Tree) -> None:
        """The root moved within the tree: drop what is no longer below it."""
        ...
