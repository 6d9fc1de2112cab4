"""Which rows of a run one drafter's KV cache holds, and which it has yet to compute.

A drafter's rows follow the same rule of liveness as a stage's. Context rows that it has not
computed (the prompt at first, later accepted leaves, or the whole context while another drafter
drafts) are its *lag*; they lead its next pass. A *refreshed* drafter drafts from the target's
hidden rows. It computes a tree's rows from predicted ones, so after every verdict it recomputes the
accepted rows and drops the rest (docs/algorithms.md#draft-heads). A *block drafter* keeps no row of
the tree beyond the pass that computed it (docs/algorithms.md#block-drafters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.work import Kept, Part
from flowspec.core.run.key import RunKey
from flowspec.core.tree.live_rows import LiveRows
from flowspec.core.tree.tree import Node, Tree

#: Most context rows that a drafter computes in one pass.
CATCH_UP_ROWS = 256


@dataclass(frozen=True, slots=True)
class _LagRow:
    """A context row the drafter has not computed."""

    id: int
    parent: int
    token: int


class DrafterCache:
    """One drafter's rows of one run, whose text so far is ``prefix``.

    ``levels``: positions that it proposes for in one pass, if it is a block drafter. ``held``: rows
    of the text that it has from the start.
    """

    def __init__(
        self,
        prefix: Sequence[int],
        *,
        refreshed: bool = False,
        levels: int = 0,
        held: int = 0,
    ) -> None:
        self.refreshed = refreshed
        self.levels = levels
        self._rows = LiveRows(len(prefix), held)
        text = [_LagRow(at, at - 1, prefix[at]) for at in range(held, len(prefix))]
        # The prompt's hidden rows arrive with the first verdict, not before.
        self._lag = [] if refreshed else text
        self._without_hidden = text if refreshed else []

    @property
    def lags(self) -> bool:
        """Whether a pass over context rows alone is due.

        A block drafter makes one only when it is overdue: its proposals for further levels are
        known without a pass, so most commits are followed by none.
        """
        return self.overdue if self.levels else bool(self._lag)

    @property
    def lag(self) -> int:
        """Context rows that it has not computed."""
        return len(self._lag)

    @property
    def has_prompt(self) -> bool:
        """Whether all rows of the prompt are computed."""
        return self._rows.context >= self._rows.prompt_length

    @property
    def overdue(self) -> bool:
        """Whether this is a refreshed drafter that lags by at least a whole pass.

        It keeps hidden rows, those of rejected nodes included, until it has computed them. So an
        overdue drafter goes first, which bounds the rows that it keeps.
        """
        return self.refreshed and len(self._lag) >= CATCH_UP_ROWS

    @property
    def tree_rows(self) -> int:
        """Rows held beyond the context."""
        return len(self._rows.tree)

    @property
    def computed(self) -> int:
        """Rows of the text that it has computed."""
        return self._rows.context

    def keep(self, most: int) -> Kept:
        """Its rows of the text to keep, at most ``most``; for the end of the run."""
        return Kept(min(self._rows.context, most), self._rows.begin_pass((), ()))

    def share(self, most: int) -> Kept:
        """Its first rows of the text, at most ``most``, to keep while the run goes on."""
        return Kept(min(self._rows.context, most))

    def with_ancestors(self, tree: Tree, nodes: Sequence[int]) -> list[int]:
        """``nodes`` and those ancestors in the tree that are not held, parents first."""
        missing: set[int] = set()
        held = self._rows.tree
        for node in nodes:
            while node not in missing and node not in held:
                missing.add(node)
                if node == tree.root:
                    break
                node = tree[node].parent
        return sorted(missing.union(nodes))

    def next_part(
        self, run: RunKey, tree: Tree, wanted: Sequence[int]
    ) -> tuple[Part, tuple[int, ...]] | None:
        """The next pass, and the nodes it answers; None: there is nothing to compute.

        The pass computes the lag, and then ``wanted`` if the whole lag fits into it. ``wanted`` has
        the ancestors that are not held (``with_ancestors``), which are answered, too; a block
        drafter needs all of them in each pass, answers for ``wanted`` alone, and adds them here.
        """
        lag = self._lag[:CATCH_UP_ROWS]
        asked = tuple(wanted) if len(lag) == len(self._lag) else ()
        nodes = tuple(self.with_ancestors(tree, asked)) if self.levels else asked
        if not lag and not nodes:
            return None
        self._lag = self._lag[len(lag) :]
        first = self._rows.context
        answered = set(asked)
        ids = (*(row.id for row in lag), *nodes)
        parents = (*(row.parent for row in lag), *(tree[node].parent for node in nodes))
        part = Part(
            run=run,
            segment=-1,
            ids=ids,
            parents=parents,
            positions=(
                *range(first, first + len(lag)),
                *(tree[node].position for node in nodes),
            ),
            tokens=(*(row.token for row in lag), *(tree[node].token for node in nodes)),
            offsets=(),
            context=len(lag),
            pruned=self._rows.begin_pass(ids, parents, len(lag)),
            answers=tuple(len(lag) + at for at, node in enumerate(nodes) if node in answered),
        )
        if self.levels:
            self._rows.forget_tree(self._rows.root)
        return part, asked

    def commit(self, accepted: Sequence[Node], root: int) -> None:
        """Make the nodes ``accepted``, the old root first, context, and ``root`` the root."""
        rows = self._rows
        if self.refreshed:
            rows.forget_tree(root)
            self._lag += self._without_hidden
            self._without_hidden = []
            fresh = list(accepted)
        else:
            fresh = [node for node in accepted if node.id not in rows]
            rows.prune([node.id for node in accepted], root)
        # The prefix's last row is the first root, and is in the lag from the start.
        self._lag += [
            _LagRow(node.id, node.parent, node.token)
            for node in fresh
            if node.id >= rows.prompt_length
        ]
