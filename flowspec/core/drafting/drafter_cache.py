"""Which rows of a job one drafter holds, and which it owes.

A drafter's KV rows follow the same slot arithmetic as a stage's. Context rows it has not
computed (the prompt at first, later accepted leaves, or all there is while another drafter
drafts) are its *lag*; they lead its next pass. A drafter that is *refreshed* drafts from the
target's hidden rows: what it computed for a tree was computed from guesses, so every verdict
makes it compute the accepted rows anew and forget the rest (``algorithms.md`` 2.12).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.machine import Part
from flowspec.core.tree.slots import SlotTable
from flowspec.core.tree.tree import Node, Tree

#: Context rows fed to the drafter in one pass.
CATCH_UP_ROWS = 256


class DrafterCache:
    """One drafter's rows of one job, whose prompt is ``prompt``."""

    def __init__(self, prompt: tuple[int, ...], *, refreshed: bool = False) -> None:
        self.refreshed = refreshed
        self._slots = SlotTable(len(prompt))
        self._prompt = list(enumerate(prompt))
        # The hidden rows of the prompt are there with the first verdict, not before.
        self._lag = [] if refreshed else self._prompt  # (id, token)

    @property
    def lags(self) -> bool:
        """Context rows are owed."""
        return bool(self._lag)

    @property
    def overdue(self) -> bool:
        """A whole pass of context rows is owed by a drafter that has to keep hidden rows, and those
        of rejected nodes too, until it has computed them: it goes first, so that what it keeps
        is bounded.
        """
        return self.refreshed and len(self._lag) >= CATCH_UP_ROWS

    @property
    def tree_rows(self) -> int:
        """Rows held beyond the context."""
        return len(self._slots.held)

    def closed(self, tree: Tree, nodes: Sequence[int]) -> list[int]:
        """``nodes`` and those above them that are not held, parents first."""
        missing: set[int] = set()
        held = self._slots.held
        for node in nodes:
            while node not in missing and node not in held:
                missing.add(node)
                if node == tree.root:
                    break
                node = tree[node].parent
        return sorted(missing.union(nodes))

    def next_part(
        self, job: str, epoch: int, tree: Tree, wanted: Sequence[int]
    ) -> tuple[Part, tuple[int, ...], tuple[int, ...]] | None:
        """The next pass: what is owed, then ``wanted`` if that is all; with the rows' parents and
        the nodes that get an answer. None: there is nothing to do.
        """
        lag = self._lag[:CATCH_UP_ROWS]
        nodes = tuple(wanted) if len(lag) == len(self._lag) else ()
        if not lag and not nodes:
            return None
        ids = (*(node for node, _ in lag), *nodes)
        first = self._slots.context
        chain = (-1, *ids[: len(lag) - 1]) if lag else ()
        parents = (*chain, *(tree[node].parent for node in nodes))
        plan = self._slots.plan(ids, parents, len(lag))
        self._lag = self._lag[len(lag) :]
        part = Part(
            job=job,
            epoch=epoch,
            segment=-1,
            ids=ids,
            positions=(*range(first, first + len(lag)), *(tree[node].position for node in nodes)),
            tokens=(*(token for _, token in lag), *(tree[node].token for node in nodes)),
            offsets=(),
            context=plan.context,
            held=plan.held,
            moves=plan.moves,
            parents=plan.parents,
            answers=tuple(range(len(lag), len(ids))),
        )
        return part, parents, nodes

    def commit(self, accepted: Sequence[Node], root: int) -> None:
        """The nodes ``accepted``, the old root first, are context now and ``root`` is the tree's
        root.
        """
        slots = self._slots
        if self.refreshed:
            slots.forget_tree(root)
            self._lag += self._prompt
            self._prompt = []
            fresh = [(node.id, node.token) for node in accepted]
        else:
            fresh = [(node.id, node.token) for node in accepted if node.id not in slots]
            slots.prune([node.id for node in accepted], root)
        # The prompt's last row is the first root, and is in the lag from the start.
        self._lag += [(node, token) for node, token in fresh if node >= slots.prompt_length]
