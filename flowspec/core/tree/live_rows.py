"""Which tree rows of a run are live at one model; ``flowspec.model.rows.placement`` places them in
memory.

**A row is live iff it is the current root, or its parent is the root or a live tree row** (prompt
rows are context from the start). A context parent other than the root does not make a row live: a
late sibling of an accepted node has such a parent and is dead.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence

from flowspec.core.protocol.work import Pruned
from flowspec.errors import StateError


class LiveRows:
    """The rows that one model has computed for a run with ``prompt_length`` prompt tokens.

    They are ``context`` rows, which are never removed, and the live tree rows, kept by id.
    ``held``: prompt rows that it has from the start.
    """

    def __init__(self, prompt_length: int, held: int = 0) -> None:
        self.prompt_length = prompt_length
        self.root = prompt_length - 1
        self.context = held
        self._parents: dict[int, int] = {}  # live tree rows in the order they were computed
        # Rows accepted by the prunes since the last pass; None: no prunes.
        self._accepted: list[int] | None = None

    def __len__(self) -> int:
        return self.context + len(self._parents)

    def __contains__(self, node: int) -> bool:
        return node in self._parents

    @property
    def tree(self) -> KeysView[int]:
        """A view of the live tree rows' ids, in the order they were computed."""
        return self._parents.keys()

    def live(self, ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Offsets of the live ones among rows to be computed, which list parents first."""
        held = self._parents
        root = self.root
        alive: set[int] = set()
        kept = []
        for offset, (node, parent) in enumerate(zip(ids, parents, strict=True)):
            below_live = parent in alive or parent in held or parent == root
            if below_live or node == root or node < self.prompt_length:
                alive.add(node)
                kept.append(offset)
        return kept

    def begin_pass(
        self, ids: Sequence[int], parents: Sequence[int], context: int = 0
    ) -> Pruned | None:
        """Add rows ``ids``, which the next pass computes; they are live, parents first.

        The first ``context`` of them become context at once; StateError if tree rows are held then.
        Returns the prunes to apply before the pass; None: nothing.
        """
        if context and self._parents:
            raise StateError("context rows arrived behind tree rows")
        pruned = None
        if self._accepted is not None:
            pruned = Pruned(tuple(self._accepted), tuple(self._parents))
            self._accepted = None
        self.context += context
        self._parents.update(zip(ids[context:], parents[context:], strict=True))
        return pruned

    def prune(self, accepted: Sequence[int], root: int) -> None:
        """Make ``accepted``, a path from the old root, context; keep the subtree of ``root``.

        Accepted ids that were not computed here must form the path's end: rows that a drafter has
        yet to compute. They count as context only once they are computed.
        """
        computed = self._computed_path(accepted)
        self.root = root
        self.context += len(computed)
        self._accepted = [*(self._accepted or ()), *computed]
        survivors: dict[int, int] = {}
        for node, parent in self._parents.items():
            if node == root or parent in survivors:
                survivors[node] = parent
        self._parents = survivors

    def _computed_path(self, accepted: Sequence[int]) -> list[int]:
        path: list[int] = []
        for node in accepted:
            if node not in self._parents:
                break
            if path and self._parents[node] != path[-1]:
                raise StateError(f"accepted row {node} is not the child of {path[-1]}")
            path.append(node)
        return path

    def forget_tree(self, root: int) -> None:
        """Drop all tree rows, accepted ones included; ``root`` is the new root."""
        self.root = root
        self._parents = {}
        self._accepted = self._accepted or []
