"""The memory layout of a run's KV rows, which only this module computes.

Passes name rows by id (``core.protocol.work``). For each pass a row store returns the slots of the
new rows, the moves to make before it, and each row's parent, which determines the row's mask.
``ContiguousRows`` keeps a run's rows in one range of slots: first the context, then the live tree
rows in the order they were computed. Prunes edit the layout only; the next pass makes the moves of
all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.errors import StateError


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of the rows at ``sources`` to consecutive slots from ``start``, in order.

    Sources ascend and none is below its destination, so copying in place and in order is safe.
    """

    start: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a pass: ``moves`` first, then ``held`` rows, and the new rows after them.

    All rows attend to the first ``context`` rows. ``parents``: for every row from slot ``context``
    on, held rows first, the offset of its parent from that slot; -1: the parent is context.
    """

    context: int
    held: int
    moves: Moves | None
    parents: tuple[int, ...]


class RowStore(Protocol):
    """The layout of one run's rows at one model."""

    def place(self, part: Part) -> Placement:
        """Apply the part's prune and assign slots to its rows; the caller must make the moves.

        StateError if the part does not continue the held rows, or has one of them.
        """
        ...


class ContiguousRows:
    """A ``RowStore`` with all rows in one range of slots, context first.

    An example, with the ids by slot and a bar at the end of the context::

        prompt 0 1, context 2               0 1 |
        rows 2 3 4 5 with parents 1 2 2 4   0 1 | 2 3 4 5   parents -1 0 0 2
        Pruned((2,), live=(4, 5))           edits the layout only
        row 6 with parent 5                 0 1 2 | 4 5 6   parents -1 0 1, Moves(3, (4, 5)), held 5
    """

    def __init__(self, held: int = 0) -> None:
        """``held``: context rows that are in place from the start."""
        self._context = held
        # Live tree rows in slot order: id -> offset from the end of the context; and the same
        # offset of each row's parent, -1: context.
        self._places: dict[int, int] = {}
        self._parents: list[int] = []
        self._settled = held  # rows below this slot are physically in place
        # Physical slot of each row from ``_settled`` on; a range: nothing has moved.
        self._layout: Sequence[int] = range(0)

    def place(self, part: Part) -> Placement:
        if part.pruned is not None:
            self._prune(part.pruned)
        if part.context and self._places:
            raise StateError("context rows arrived behind tree rows")
        moves = self._take_moves()
        context = self._context
        held = context + len(self._places)
        places = self._places
        parents = self._parents
        for node, parent in zip(part.ids, part.parents, strict=True):
            if node in places:
                raise StateError(f"row {node} is to be computed, but is held here already")
            parents.append(places.get(parent, -1))
            places[node] = len(places)
        placement = Placement(context, held, moves, tuple(parents))
        if part.context:
            self._context += part.context
            self._places = {node: at for at, node in enumerate(part.ids[part.context :])}
            self._parents = [max(at - part.context, -1) for at in parents[part.context :]]
        self._layout = range(context, self._context + len(self._places))
        return placement

    def _prune(self, pruned: Pruned) -> None:
        kept = [self._place(node) for node in (*pruned.accepted, *pruned.live)]
        if kept != sorted(kept):
            raise StateError("rows were not held parents first")
        layout = self._layout
        first_tree = self._context - self._settled
        self._layout = [*layout[:first_tree], *(layout[first_tree + at] for at in kept)]
        self._context += len(pruned.accepted)
        live = kept[len(pruned.accepted) :]
        moved = {before: after for after, before in enumerate(live)}
        self._parents = [moved.get(self._parents[at], -1) for at in live]
        self._places = {node: at for at, node in enumerate(pruned.live)}

    def _place(self, node: int) -> int:
        place = self._places.get(node)
        if place is None:
            raise StateError(f"row {node} is to be kept, but is not held here")
        return place

    def _take_moves(self) -> Moves | None:
        """The copies that bring every row to its slot in the layout."""
        layout = self._layout
        settled = self._settled
        self._settled = self._context
        if isinstance(layout, range):
            return None
        there = enumerate(layout, settled)
        same = next((slot - settled for slot, source in there if slot != source), len(layout))
        return Moves(settled + same, tuple(layout[same:])) if same < len(layout) else None


def row_store(held: int = 0) -> RowStore:
    """A row store of the layout that every cache uses; ``held``: as in ``ContiguousRows``."""
    return ContiguousRows(held)


def settling(run: RunKey, pruned: Pruned | None) -> Part:
    """A part without rows that applies ``pruned``."""
    return Part(run, -1, (), (), (), (), (), pruned=pruned)
