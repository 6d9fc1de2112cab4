"""A session's dealings with the drafter: the growth under way, and which rows the drafter holds.

The drafter's KV rows follow the same slot arithmetic as a stage's. Context rows it has not computed
(the prompt at first, later accepted leaves) are its *lag*; they lead the next pass. A drafter that is
*refreshed* drafts from the target's hidden rows: what it computed for a tree was computed from guesses,
so every verdict makes it compute the accepted rows anew and forget the rest (``algorithms.md`` 2.12). What
it had proposed goes too, unless the strategy needs it at once (``Strategy.redrafts``).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.accept import Verdict
from flowspec.core.calibrate import Calibration, Scaling
from flowspec.core.machine import Draft, DraftDone, Part
from flowspec.core.slots import SlotTable
from flowspec.core.strategy import Growth
from flowspec.core.tree import Expansion, Node, Tree
from flowspec.errors import ProtocolError, StateError

#: Context rows fed to the drafter in one pass.
CATCH_UP_ROWS = 256
#: Tree rows the drafter may hold beyond the context; a growth that needs more ends where it is.
DRAFT_TREE_ROWS = 2048


class Drafting:
    """Growth and drafter rows of one job; ``width`` continuations are asked per node, 0: no drafter.

    ``calibration``: says what every candidate is worth; None: only where the drafter's numbers cannot, by a new one.
    """

    def __init__(
        self, job: str, epoch: int, prompt: tuple[int, ...], width: int, coupled: bool = False,
        refreshed: bool = False, redrafts: bool = True, calibration: Calibration | Scaling | None = None,
    ) -> None:  # fmt: skip
        self.was_idle = False
        self._job, self._epoch = job, epoch
        self._width, self._coupled = width, coupled
        self._refreshed, self._redrafts = refreshed, redrafts
        self._growth: Growth | None = None
        self._growth_passes = 0
        self._wanted: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()  # nodes of the pass being computed
        self._stale: set[int] = set()  # of those, the ones a refresh has overtaken
        self._slots = SlotTable(len(prompt))
        self._calibrates, self._calibration = calibration is not None, calibration or Calibration(coupled)
        self._prompt = list(enumerate(prompt))
        # The hidden rows of the prompt are there with the first verdict, not before.
        self._lag = [] if refreshed or not width else self._prompt  # (id, token)

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

    def wants(self, tree: Tree) -> bool:
        """Whether the growth under way needs nodes drafted before it can go on."""
        if self._growth is None:
            return False
        self._wanted = tuple(self._closed(tree, self._growth.pending(tree)))
        if len(self._slots.held) + len(self._wanted) > DRAFT_TREE_ROWS:
            self._wanted = ()
        return bool(self._wanted)

    def _closed(self, tree: Tree, nodes: Sequence[int]) -> list[int]:
        """``nodes`` and those above them that the drafter does not hold, parents first."""
        missing: set[int] = set()
        held = self._slots.held
        for node in nodes:
            while node not in missing and node not in held:
                missing.add(node)
                if node == tree.root:
                    break
                node = tree[node].parent
        return sorted(missing.union(nodes))

    def collect(self, tree: Tree) -> list[list[int]]:
        """The grown segments; the growth is over."""
        if self._growth is None:
            raise StateError("there is no growth to collect")
        growth, self._growth, self._wanted = self._growth, None, ()
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
        parents = (*chain, *(tree[node].parent for node in nodes))
        return Draft(part, self._width, growth_pass, parents, self._coupled)

    def done(self, result: DraftDone, tree: Tree) -> None:
        """Take the proposals of the pass; nodes pruned meanwhile are forgotten."""
        asked, self._asked = self._asked, ()
        stale, self._stale = self._stale, set()
        if not len(result.tokens) == len(result.values) == len(asked) or len(result.sources) not in (0, len(asked)):
            raise ProtocolError("the drafter did not answer for the rows it was asked for")
        for at, node in enumerate(asked):
            if node in tree and node not in stale:
                sources = result.sources[at] if result.sources else ()
                tree.expand(node, self._expansion(result.tokens[at], result.values[at], sources))

    def _expansion(self, tokens: tuple[int, ...], values: tuple[float, ...], sources: Sequence[int]) -> Expansion:
        if self._calibrates or self._coupled or sources:
            return self._calibration.expansion(tokens, values, sources)
        return Expansion(tokens, values)

    def observe(self, tree: Tree, verdict: Verdict) -> None:
        """Learn from a verdict that was not applied yet what candidates are worth."""
        for node, token in zip(verdict.accepted, verdict.tokens, strict=True):
            self._calibration.observe(tree[node], token)

    def commit(self, accepted: Sequence[Node], root: int, tree: Tree) -> None:
        """The nodes ``accepted``, the old root first, are context now and ``root`` is the tree's root."""
        if self._refreshed:
            self._refresh(accepted, tree)
        else:
            fresh = [(node.id, node.token) for node in accepted if node.id not in self._slots]
            self._slots.prune([node.id for node in accepted], root)
            if self._width:
                # The prompt's last row is the first root, and is in the lag from the start.
                self._lag += [(node, token) for node, token in fresh if node >= self._slots.prompt_length]

    def _refresh(self, accepted: Sequence[Node], tree: Tree) -> None:
        self._slots.forget_tree(tree.root)
        self._lag += self._prompt
        self._lag += [(node.id, node.token) for node in accepted if node.id >= self._slots.prompt_length]
        self._prompt = []
        if self._redrafts:
            self._stale = set(self._asked)
            for node in tree:
                node.expansion = None
