"""A session's dealings with its drafters: the growth under way, and who is asked for what it waits
for.

One drafter drafts at a time; the others fall behind and catch up when their turn comes
(``core.holding``). What a refreshed drafter had proposed goes with every verdict, unless the
strategy needs it at once (``Strategy.redrafts``).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.drafting.calibration import Calibration, Scaling
from flowspec.core.drafting.drafter_cache import DrafterCache
from flowspec.core.drafting.growth import Growth
from flowspec.core.protocol.machine import Draft, DraftDone
from flowspec.core.tree.accept import Verdict
from flowspec.core.tree.tree import Expansion, Node, Tree
from flowspec.errors import ProtocolError, StateError

#: Tree rows a drafter may hold beyond the context; a growth that needs more ends where it is.
DRAFT_TREE_ROWS = 2048
#: Most sources a drafter may be merged from: their candidates are told apart by number, over all
#: drafters.
MOST_SOURCES = 16


class Drafting:
    """Growth and drafters' rows of one job; ``width`` continuations are asked per node, 0: no
    drafter.

    ``refreshed``: of every drafter there is to choose from, whether it is. ``calibration``: says
    what every candidate is worth; None: only where the drafter's numbers cannot, by a new one.
    """

    def __init__(
        self,
        job: str,
        epoch: int,
        prompt: tuple[int, ...],
        width: int,
        coupled: bool = False,
        refreshed: Sequence[bool] = (False,),
        redrafts: bool = True,
        calibration: Calibration | Scaling | None = None,
    ) -> None:
        self.was_idle = False
        self._job = job
        self._epoch = epoch
        self._width = width
        self._coupled = coupled
        self._redrafts = redrafts
        self._growth: Growth | None = None
        self._growth_passes = 0
        self._wanted: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()  # nodes of the pass being computed
        self._answers_next = 0  # the drafter that computes it
        self._stale: set[int] = set()  # of those, the ones a refresh has overtaken
        self._calibrates = calibration is not None
        self._calibration = calibration or Calibration(coupled)
        self._holdings = (
            [DrafterCache(prompt, refreshed=each) for each in refreshed] if width else []
        )
        self._active = 0
        self._passes = [
            (0, 0.0) for _ in refreshed
        ]  # by drafter: those that answered, and their seconds

    @property
    def growing(self) -> bool:
        """A growth has not been handed over yet."""
        return self._growth is not None

    @property
    def has_work(self) -> bool:
        """A pass could start now."""
        lags = bool(self._holdings) and self._holdings[self._turn].lags
        return not self._asked and bool(self._wanted or lags)

    @property
    def _turn(self) -> int:
        """Whose pass is next: the active drafter's, unless one is overdue."""
        overdue = (number for number, holding in enumerate(self._holdings) if holding.overdue)
        return next(overdue, self._active)

    @property
    def continuing(self) -> bool:
        """The growth under way has been drafted for and wants another pass."""
        return self.has_work and self._growth is not None and self._growth_passes > 0

    @property
    def pass_seconds(self) -> float:
        """Of an answering pass of the drafter that drafts now, on average; 0: it made none."""
        count, seconds = self._passes[self._active]
        return seconds / count if count else 0.0

    def begin(self, growth: Growth | None, *, idle: bool, drafter: int = 0) -> None:
        """Put ``growth`` in the place of the one under way; expansions known so far stay in the
        tree. ``drafter`` drafts for it, by its number; a pass under way is still answered by its
        own.
        """
        self._growth = growth
        self.was_idle = idle
        self._active = drafter
        self._growth_passes = 0
        self._wanted = ()

    def wants(self, tree: Tree) -> bool:
        """Whether the growth under way needs nodes drafted before it can go on."""
        if self._growth is None:
            return False
        holding = self._holdings[self._active]
        self._wanted = tuple(holding.closed(tree, self._growth.pending(tree)))
        if holding.tree_rows + len(self._wanted) > DRAFT_TREE_ROWS:
            self._wanted = ()
        return bool(self._wanted)

    def collect(self, tree: Tree) -> list[list[int]]:
        """The grown segments; the growth is over."""
        if self._growth is None:
            raise StateError("there is no growth to collect")
        growth = self._growth
        self._growth = None
        self._wanted = ()
        return growth.segments(tree)

    def harvest(self, tree: Tree) -> list[list[int]]:
        """End a growth that a verdict has overtaken; what it has of use below the new root.

        Without this a drafter slower than the pipeline would never finish a growth: each verdict
        would find it half done, start it over, and the pipeline would run dry.
        """
        if self._growth is None:
            return []
        growth = self._growth
        self._growth = None
        self._wanted = ()
        growth.rebase(tree)
        return growth.segments(tree)

    def next_work(self, tree: Tree) -> Draft | None:
        """The next pass: what a drafter lags behind, then the nodes the growth waits for if it is
        the active one.
        """
        turn = self._turn
        wanted = self._wanted if turn == self._active else ()
        found = self._holdings[turn].next_part(self._job, self._epoch, tree, wanted)
        if found is None:
            return None
        part, parents, nodes = found
        self._asked = nodes
        self._answers_next = turn
        self._wanted = () if nodes else self._wanted
        growth_pass = self._growth_passes
        self._growth_passes = self._growth_passes + bool(nodes)
        return Draft(part, self._width, growth_pass, parents, self._coupled, turn)

    def done(self, result: DraftDone, tree: Tree, seconds: float = 0.0) -> None:
        """Take the proposals of the pass, which took ``seconds``; nodes pruned meanwhile are
        forgotten.
        """
        asked = self._asked
        self._asked = ()
        stale = self._stale
        self._stale = set()
        if not len(result.tokens) == len(result.values) == len(asked) or len(
            result.sources
        ) not in (0, len(asked)):
            raise ProtocolError("the drafter did not answer for the rows it was asked for")
        if asked:
            count, spent = self._passes[self._answers_next]
            self._passes[self._answers_next] = (count + 1, spent + seconds)
        for at, node in enumerate(asked):
            if node in tree and node not in stale:
                sources = result.sources[at] if result.sources else ()
                tree.expand(node, self._expansion(result.tokens[at], result.values[at], sources))

    def _expansion(
        self, tokens: tuple[int, ...], values: tuple[float, ...], sources: Sequence[int]
    ) -> Expansion:
        if self._answers_next:
            sources = [
                self._answers_next * MOST_SOURCES + source
                for source in sources or (0,) * len(tokens)
            ]
        if self._calibrates or self._coupled or sources:
            return self._calibration.expansion(tokens, values, sources)
        return Expansion(tokens, values)

    def observe(self, tree: Tree, verdict: Verdict) -> None:
        """Learn from a verdict that was not applied yet what candidates are worth."""
        for node, token in zip(verdict.accepted, verdict.tokens, strict=True):
            self._calibration.observe(tree[node], token)

    def commit(self, accepted: Sequence[Node], root: int, tree: Tree) -> None:
        """The nodes ``accepted``, the old root first, are context now and ``root`` is the tree's
        root.
        """
        for holding in self._holdings:
            holding.commit(accepted, root)
        if self._redrafts and self._holdings and self._holdings[self._active].refreshed:
            self._stale = set(self._asked)
            for node in tree:
                node.expansion = None
