"""What a strategy answers. A strategy is one job's plan: it looks at the tree, and knows no I/O.

The session asks ``grow`` at three occasions, drives the growth it gets until nothing is pending, and
sends the segments the growth then names. Before it passes a verdict it asks ``judges``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from flowspec.core.tree import Tree


class Occasion(enum.Enum):
    """Why a strategy is asked to grow the tree."""

    ROUND = "round"  #: a root was planted and nothing else is in the tree
    VERDICT = "verdict"  #: the root moved to a node of the tree, all else was pruned
    IDLE = "idle"  #: a pipeline slot is free, nothing waits to be sent, the drafter is free


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may see of its session; it must not change the tree outside a growth."""

    tree: Tree
    in_flight: int  # segments sent and neither answered nor emptied by a prune
    waiting: int  # segments cut but not sent


class Growth(Protocol):
    """One growing of the tree, by whatever rule."""

    def pending(self, tree: Tree) -> tuple[int, ...]:
        """Nodes whose expansions are needed before it can go on; empty when it is grown."""
        ...

    def segments(self, tree: Tree) -> list[list[int]]:
        """What to send, in order: nodes not in T before, each after its parent. Asked once, at the end."""
        ...

    def rebase(self, tree: Tree) -> None:
        """The root moved within the tree: forget what is no longer below it."""
        ...


class Strategy(Protocol):
    """One system's answers for one job."""

    #: Continuations to draft per node; 0: this strategy never drafts.
    width: int
    #: Segments allowed in flight.
    capacity: int
    #: Keep the papers' barrier: a stage starts a step only after the verdict of the one N steps before.
    lockstep: bool

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        """A growth to carry out now, or None to leave the tree as it is."""
        ...

    def judges(self, view: View) -> bool:
        """Whether the answers at hand may be judged now; answers are kept until then."""
        ...
