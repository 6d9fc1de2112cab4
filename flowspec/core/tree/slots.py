"""Which KV rows a job holds at one model, and where: arithmetic only.

Slots 0..context-1 hold the context, the rows after it the live tree nodes in order of arrival. A
prune turns accepted rows into context and drops the dead; the rows that stay move down. Prunes
only edit the layout: the plan of the next pass says, once for all of them, which rows to copy
where.

**A row is live iff it is the current root, or its parent is the root or a live tree row**
(prompt rows are context from the start). Context ids never make a child live: a late sibling of
an accepted node has an accepted parent and is dead.
"""

from __future__ import annotations

import itertools
from collections.abc import KeysView, Sequence
from dataclasses import dataclass

from flowspec.errors import StateError


@dataclass(frozen=True, slots=True)
class Moves:
    """Copy the rows at ``sources`` to consecutive slots from ``start``, in order; sources ascend
    and none lies below its destination, so copying in order in place is safe.
    """

    start: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of a pass go: after ``moves``, the ``held`` rows stay and the new ones follow
    them.

    ``context`` rows are seen by all. ``parents``: for every row from slot ``context`` on, held
    rows first, the offset of its parent from that slot; -1 where the parent is context.
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
        # Live tree rows in slot order: id -> place behind the context, and the parent's place, -1:
        # context.
        self._places: dict[int, int] = {}
        self._above: list[int] = []
        self._base = 0  # slots below hold their rows physically
        self._layout: Sequence[int] = range(
            0
        )  # physical slot of each row from ``_base`` on; a range: nothing moved

    @property
    def length(self) -> int:
        """Rows held, context and tree."""
        return self.context + len(self._places)

    @property
    def live(self) -> tuple[int, ...]:
        """Ids of the tree rows in slot order."""
        return tuple(self._places)

    @property
    def held(self) -> KeysView[int]:
        """Ids of the tree rows in slot order, as they are at any time."""
        return self._places.keys()

    def __contains__(self, node: int) -> bool:
        return node in self._places

    def is_live(self, node: int, parent: int) -> bool:
        """The rule of the module's head, for a row about to be computed."""
        return bool(self.live_rows((node,), (parent,)))

    def live_rows(self, ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Offsets of those of rows about to be computed that are live; parents come first."""
        held = self._places
        root = self.root
        prompt_length = self.prompt_length
        alive: set[int] = set()
        kept = []
        for offset, (node, parent) in enumerate(zip(ids, parents, strict=True)):
            if (
                parent in alive
                or parent in held
                or parent == root
                or node == root
                or node < prompt_length
            ):
                alive.add(node)
                kept.append(offset)
        return kept

    def plan(self, ids: Sequence[int], parents: Sequence[int], context_rows: int = 0) -> Placement:
        """Give the next slots to ``ids``, which are live and come parents first.

        The first ``context_rows`` of them are context at once (prompt rows, or accepted rows a
        drafter never computed); tree rows may then only follow them. The caller must carry the
        plan out.
        """
        if context_rows and self._places:
            raise StateError("context rows arrived behind tree rows")
        moves = self._take_moves()
        context = self.context
        held = self.length
        places = self._places
        above = self._above
        for node, parent in zip(ids, parents, strict=True):
            above.append(places.get(parent, -1))
            places[node] = len(places)
        plan = Placement(context, held, moves, tuple(above))
        if context_rows:
            self.context += context_rows
            self._places = {node: at for at, node in enumerate(ids[context_rows:])}
            self._above = [max(at - context_rows, -1) for at in above[context_rows:]]
        self._layout = range(context, self.length)
        return plan

    def prune(self, accepted: Sequence[int], root: int) -> None:
        """Make held ``accepted`` rows (a path from the root) context, and keep what lives under
        ``root``.

        Accepted ids that were never computed here must form the path's tail: a drafter's lag.
        """
        kept = list(
            itertools.takewhile(
                lambda at: at >= 0, (self._places.get(node, -1) for node in accepted)
            )
        )
        self.root = root
        survivors = self._keep_below(root)
        if kept != sorted(kept) or (kept and survivors and kept[-1] > survivors[0]):
            raise StateError("rows were not held parents first")
        layout = self._layout
        first_tree = self.context - self._base
        self._layout = [
            *layout[:first_tree],
            *(layout[first_tree + at] for at in itertools.chain(kept, survivors)),
        ]
        self.context += len(kept)

    def _keep_below(self, root: int) -> list[int]:
        """Drop tree rows that are neither ``root`` nor below it; the old places of
        those that stay.
        """
        moved = [-1] * len(self._above)  # by old place: the new one; -1: dropped
        places: dict[int, int] = {}
        above: list[int] = []
        survivors: list[int] = []
        for at, (node, parent) in enumerate(zip(self._places, self._above, strict=True)):
            parent = moved[parent] if parent >= 0 else -1
            if parent >= 0 or node == root:
                moved[at] = places[node] = len(survivors)
                above.append(parent)
                survivors.append(at)
        self._places = places
        self._above = above
        return survivors

    def forget_tree(self, root: int) -> None:
        """Drop every tree row, accepted ones too; ``root`` is the root."""
        self.root = root
        self._layout = self._layout[: self.context - self._base]
        self._places = {}
        self._above = []

    def _take_moves(self) -> Moves | None:
        """What has to be copied so that every row is where the table says; ``_base`` is the context
        then.
        """
        layout = self._layout
        base = self._base
        self._base = self.context
        if isinstance(layout, range):
            return None
        there = enumerate(layout, base)
        same = next((slot - base for slot, source in there if slot != source), len(layout))
        return Moves(base + same, tuple(layout[same:])) if same < len(layout) else None
