"""Which KV rows a job holds at one model, and where: arithmetic only.

Slots 0..context-1 hold the context, the rows after it the live tree nodes in order of arrival. A prune
turns accepted rows into context and drops the dead; the rows that stay move down. Prunes only edit the
layout: the plan of the next pass says, once for all of them, which rows to copy where.

**A row is live iff it is the current root, or its parent is the root or a live tree row** (prompt rows
are context from the start). Context ids never make a child live: a late sibling of an accepted node has
an accepted parent and is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.errors import StateError


@dataclass(frozen=True, slots=True)
class Moves:
    """Copy the rows at ``sources`` to consecutive slots from ``start``, in order; sources ascend and
    none lies below its destination, so copying in order in place is safe."""

    start: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the rows of a pass go: after ``moves``, the ``held`` rows stay and the new ones follow them.

    ``context`` rows are seen by all. ``parents``: for every row from slot ``context`` on, held rows
    first, the offset of its parent from that slot; -1 where the parent is context.
    """

    context: int
    held: int
    moves: Moves | None
    parents: tuple[int, ...]


class SlotTable:
    """Rows of one job: ``context`` rows, then tree rows by id."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.root = prompt_length - 1
        self.context = 0
        self._parents: dict[int, int] = {}  # live tree rows in slot order: id -> parent
        self._base = 0  # slots below hold their rows physically
        self._layout: list[int] = []  # physical slot of each row from ``_base`` on

    @property
    def length(self) -> int:
        """Rows held, context and tree."""
        return self.context + len(self._parents)

    @property
    def live(self) -> tuple[int, ...]:
        """Ids of the tree rows in slot order."""
        return tuple(self._parents)

    def __contains__(self, node: int) -> bool:
        return node in self._parents

    def is_live(self, node: int, parent: int) -> bool:
        """The rule of the module's head, for a row about to be computed."""
        return node < self.prompt_length or node == self.root or parent == self.root or parent in self._parents

    def plan(self, ids: Sequence[int], parents: Sequence[int], context_rows: int = 0) -> Plan:
        """Give the next slots to ``ids``, which are live and come parents first.

        The first ``context_rows`` of them are context at once (prompt rows, or accepted rows a drafter
        never computed); tree rows may then only follow them. The caller must carry the plan out.
        """
        moves = self._take_moves()
        place = {node: at for at, node in enumerate(self._parents)}
        offsets = [place.get(parent, -1) for parent in self._parents.values()]
        for node, parent in zip(ids, parents, strict=True):
            offsets.append(place.get(parent, -1))
            place[node] = len(place)
        plan = Plan(self.context, self.length, moves, tuple(offsets))
        if context_rows and self._parents:
            raise StateError("context rows arrived behind tree rows")
        self.context += context_rows
        self._parents.update(zip(ids[context_rows:], parents[context_rows:], strict=True))
        self._layout.extend(range(self._base + len(self._layout), self._base + len(self._layout) + len(ids)))
        return plan

    def prune(self, accepted: Sequence[int], root: int) -> None:
        """Make held ``accepted`` rows (a path from the root) context, and keep what lives under ``root``.

        Accepted ids that were never computed here must form the path's tail: a drafter's lag.
        """
        kept: list[int] = []
        first_tree = self.context - self._base
        place = {node: first_tree + at for at, node in enumerate(self._parents)}
        for node in accepted:
            if node not in place:
                break
            kept.append(place[node])
        self.root = root
        survivors: dict[int, int] = {}
        for node, parent in self._parents.items():
            if node == root or parent in survivors:
                survivors[node] = parent
        rows = [*range(first_tree), *kept, *(place[node] for node in survivors)]
        if rows != sorted(rows):
            raise StateError("rows were not held parents first")
        self._layout = [self._layout[row] for row in rows]
        self.context += len(kept)
        self._parents = survivors

    def forget_tree(self, root: int) -> None:
        """Drop every tree row, accepted ones too; ``root`` is the root."""
        self.root = root
        self._layout = self._layout[: self.context - self._base]
        self._parents = {}

    def _take_moves(self) -> Moves | None:
        same = 0
        while same < len(self._layout) and self._layout[same] == self._base + same:
            same += 1
        sources = tuple(self._layout[same:])
        moves = Moves(self._base + same, sources) if sources else None
        self._base, self._layout = self.context, list(range(self.context, self.length))
        return moves
