"""A session's dealings with the drafter: the growth under way, and which rows the drafter holds.

The drafter's KV rows follow the same slot arithmetic as a stage's. Context rows it has not computed
(the prompt at first, later accepted leaves) are its *lag*; they lead the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.machine import Draft, DraftDone, Part
from flowspec.core.slots import SlotTable
from flowspec.core.strategy import Growth
from flowspec.core.tree import Expansion, Tree
from flowspec.errors import StateError

#: Context rows fed to the drafter in one pass.
CATCH_UP_ROWS = 256
#: Tree rows the drafter may hold beyond the context; a growth that needs more ends where it is.
DRAFT_TREE_ROWS = 1024


class Drafting:
    """Growth and drafter rows of one job; ``width`` continuations are asked per node, 0: no drafter."""

    def __init__(self, job: str, epoch: int, prompt: tuple[int, ...], width: int) -> None:
        self.was_idle = False
        self._job, self._epoch = job, epoch
        self._width = width
        self._growth: Growth | None = None
        self._growth_passes = 0
        self._wanted: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()  # nodes of the pass being computed
        self._slots = SlotTable(len(prompt))
        self._lag = [(at, token) for at, token in enumerate(prompt)] if width else []  # (id, token)

    @property
    def growing(self) -> bool:
        """A growth has not been handed over yet."""
        return self._growth is not None

    @property
    def has_work(self) -> bool:
        """A pass could start now."""
        return not self._asked and bool(self._wanted or self._lag)

    @property
    def continuing(self) -> bool:
        """The growth under way has been drafted for and wants another pass."""
        return self.has_work and self._growth is not None and self._growth_passes > 0

    def begin(self, growth: Growth | None, *, idle: bool) -> None:
        """Put ``growth`` in the place of the one under way; expansions known so far stay in the tree."""
        self._growth, self.was_idle = growth, idle
        self._growth_passes = 0
        self._wanted = ()

    def advance(self, tree: Tree) -> list[list[int]] | None:
        """The grown segments, ending the growth; None while nodes have to be drafted."""
        if self._growth is None:
            raise StateError("there is no growth to advance")
        self._wanted = self._growth.pending(tree)
        if self._wanted and len(self._slots.live) + len(self._wanted) <= DRAFT_TREE_ROWS:
            return None
        self._wanted = ()
        growth, self._growth = self._growth, None
        return growth.segments(tree)

    def harvest(self, tree: Tree) -> list[list[int]]:
        """End a growth that a verdict has overtaken; what it has of use below the new root.

        Without this a drafter slower than the pipeline would never finish a growth: each verdict would
        find it half done, start it over, and the pipeline would run dry.
        """
        if self._growth is None:
            return []
        growth, self._growth, self._wanted = self._growth, None, ()
        growth.rebase(tree)
        return growth.segments(tree)

    def next_work(self, tree: Tree) -> Draft | None:
        """The next pass of the drafter: what it lags behind, then the nodes the growth waits for."""
        lag = self._lag[:CATCH_UP_ROWS]
        nodes = self._wanted if len(lag) == len(self._lag) else ()
        if not lag and not nodes:
            return None
        ids = (*(node for node, _ in lag), *nodes)
        first = self._slots.context
        positions = (*range(first, first + len(lag)), *(tree[node].position for node in nodes))
        tokens = (*(token for _, token in lag), *(tree[node].token for node in nodes))
        chain = (-1, *ids[: len(lag) - 1]) if lag else ()
        plan = self._slots.plan(ids, (*chain, *(tree[node].parent for node in nodes)), len(lag))
        self._lag, self._asked = self._lag[len(lag) :], nodes
        self._wanted = () if nodes else self._wanted
        part = Part(
            job=self._job,
            epoch=self._epoch,
            segment=-1,
            ids=ids,
            positions=positions,
            tokens=tokens,
            offsets=(),
            context=plan.context,
            held=plan.held,
            moves=plan.moves,
            parents=plan.parents,
            answers=tuple(range(len(lag), len(ids))),
        )
        growth_pass, self._growth_passes = self._growth_passes, self._growth_passes + bool(nodes)
        return Draft(part, self._width, growth_pass)

    def done(self, result: DraftDone, tree: Tree) -> None:
        """Take the proposals of the pass; nodes pruned meanwhile are forgotten."""
        for node, tokens, values in zip(self._asked, result.tokens, result.values, strict=True):
            if node in tree:
                tree.expand(node, Expansion(tokens, values))
        self._asked = ()

    def commit(self, accepted: Sequence[tuple[int, int]], root: int) -> None:
        """The nodes ``accepted`` (id, token), the old root first, are context now and ``root`` is the root."""
        fresh = [(node, token) for node, token in accepted if node not in self._slots]
        self._slots.prune([node for node, _ in accepted], root)
        if self._width:
            # The prompt's last row is the first root, and is in the lag from the start.
            self._lag += [(node, token) for node, token in fresh if node >= self._slots.prompt_length]
