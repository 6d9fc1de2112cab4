"""The current growth of one run, and the drafter passes it needs.

One drafter drafts at a time; the others lag and catch up when they are chosen (``drafter_cache``).
A refreshed drafter's proposals are dropped at every verdict, unless the strategy's ``redrafts`` is
False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.drafting.calibration import Calibration, Calibrations
from flowspec.core.drafting.drafter_cache import DrafterCache
from flowspec.core.drafting.growth import Growth
from flowspec.core.protocol.work import Draft, DraftDone
from flowspec.core.run.key import RunKey
from flowspec.core.tree.accept import Verdict
from flowspec.core.tree.tree import Expansion, Node, Tree
from flowspec.errors import ProtocolError, StateError

#: Most tree rows a drafter holds beyond the context; a growth that needs more ends early.
DRAFT_TREE_ROWS = 2048
#: Most sources merged into one drafter; a source's number is unique over all drafters.
MOST_SOURCES = 16


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """How to draft for a run.

    ``width``: continuations per node; 0: the run has no drafter. ``coupled``: the drafter sees the
    target's noise. ``refreshed``: per available drafter, whether it drafts from hidden rows.
    ``redrafts``: drop a refreshed drafter's proposals at every verdict. ``calibration``: the model
    that gives coupled candidates and those with a source number their values; None: a new one.
    ``calibrates_all``: it gives all others theirs, too.
    """

    width: int
    coupled: bool = False
    refreshed: tuple[bool, ...] = (False,)
    redrafts: bool = True
    calibration: Calibration | None = None
    calibrates_all: bool = False


@dataclass(slots=True)
class _PassTally:
    """The number of answering passes of one drafter, and their seconds."""

    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Asked:
    """Nodes of the pass in progress, and the drafter that computes it.

    ``stale``: nodes whose proposals a verdict has voided since the pass began.
    """

    nodes: tuple[int, ...] = ()
    drafter: int = 0
    stale: frozenset[int] = frozenset()


class Drafting:
    """The growth and the drafters' rows of ``run``, whose text so far is ``prefix``."""

    def __init__(self, run: RunKey, prefix: Sequence[int], options: DraftingOptions) -> None:
        self.began_idle = False  # the current or last growth began on Occasion.IDLE
        self._run = run
        self._options = options
        self._growth: Growth | None = None
        self._growth_passes = 0
        self._wanted: tuple[int, ...] = ()
        self._asked = _Asked()
        self._calibration = options.calibration or Calibrations().model(
            coupled=options.coupled, sampled=options.coupled
        )
        drafters = options.refreshed if options.width else ()
        self._caches = [DrafterCache(prefix, refreshed=refreshed) for refreshed in drafters]
        self._passes = [_PassTally() for _ in options.refreshed]
        self._active = 0

    @property
    def growing(self) -> bool:
        """Whether there is a growth that has not been collected."""
        return self._growth is not None

    @property
    def has_work(self) -> bool:
        """Whether a pass could start now."""
        lags = bool(self._caches) and self._caches[self._next_drafter].lags
        return not self._asked.nodes and bool(self._wanted or lags)

    @property
    def _next_drafter(self) -> int:
        """The drafter of the next pass: the active one, unless one is overdue."""
        overdue = (number for number, cache in enumerate(self._caches) if cache.overdue)
        return next(overdue, self._active)

    @property
    def continuing(self) -> bool:
        """Whether the current growth has had a pass and needs another."""
        return self.has_work and self._growth is not None and self._growth_passes > 0

    @property
    def pass_seconds(self) -> float:
        """Mean seconds of an answering pass of the active drafter; 0: it has made none."""
        passes = self._passes[self._active]
        return passes.seconds / passes.count if passes.count else 0.0

    # ---- the growth ------------------------------------------------------------------------------

    def begin(self, growth: Growth | None, *, idle: bool, drafter: int = 0) -> None:
        """Replace the current growth by ``growth``; the tree keeps its expansions.

        ``drafter``: the number of the drafter for this growth. A pass in progress ends with its own
        drafter. StateError if the strategy drafts nothing.
        """
        if growth is not None and not self._caches:
            raise StateError("the strategy grows the tree, but its draft_width is 0")
        self._growth = growth
        self.began_idle = idle
        self._active = drafter
        self._growth_passes = 0
        self._wanted = ()

    def proceed(self, tree: Tree) -> bool:
        """Proceed with the current growth; whether it needs the drafter before it can go on."""
        if self._growth is None:
            return False
        cache = self._caches[self._active]
        self._wanted = tuple(cache.with_ancestors(tree, self._growth.proceed(tree)))
        if cache.tree_rows + len(self._wanted) > DRAFT_TREE_ROWS:
            self._wanted = ()
        return bool(self._wanted)

    def collect(self, tree: Tree) -> list[list[int]]:
        """End the current growth and return its segments."""
        growth = self._take_growth()
        if growth is None:
            raise StateError("there is no growth to collect")
        return growth.segments(tree)

    def collect_overtaken(self, tree: Tree) -> list[list[int]]:
        """End a growth that a verdict has overtaken; return its segments below the new root.

        Otherwise a drafter slower than the pipeline would never finish a growth: each verdict would
        restart it before its end, and no segments would be in flight.
        """
        growth = self._take_growth()
        if growth is None:
            return []
        growth.rebase(tree)
        return growth.segments(tree)

    def _take_growth(self) -> Growth | None:
        growth = self._growth
        self._growth = None
        self._wanted = ()
        return growth

    # ---- passes ----------------------------------------------------------------------------------

    def next_work(self, tree: Tree) -> Draft | None:
        """The next pass: a drafter's lag, then the nodes of the growth if it is active."""
        drafter = self._next_drafter
        wanted = self._wanted if drafter == self._active else ()
        found = self._caches[drafter].next_part(self._run, tree, wanted)
        if found is None:
            return None
        part, nodes = found
        self._asked = _Asked(nodes, drafter)
        growth_pass = self._growth_passes
        if nodes:
            self._wanted = ()
            self._growth_passes += 1
        return Draft(part, self._options.width, growth_pass, self._options.coupled, drafter)

    def done(self, result: DraftDone, tree: Tree, seconds: float = 0.0) -> None:
        """Take the proposals of a pass of ``seconds``, except those for pruned or stale nodes."""
        asked = self._asked
        self._asked = _Asked()
        rows = len(asked.nodes)
        answered = len(result.tokens) == len(result.values) == rows
        if not answered or len(result.sources) not in (0, rows):
            raise ProtocolError("the drafter did not answer for the rows it was asked for")
        if asked.nodes:
            self._passes[asked.drafter].count += 1
            self._passes[asked.drafter].seconds += seconds
        for at, node in enumerate(asked.nodes):
            if len(set(result.tokens[at])) != len(result.tokens[at]):
                raise ProtocolError(f"the drafter proposed a token twice after node {node}")
            if node in tree and node not in asked.stale:
                sources = result.sources[at] if result.sources else ()
                expansion = self._expansion(
                    result.tokens[at], result.values[at], sources, asked.drafter
                )
                tree.expand(node, expansion)

    def _expansion(
        self,
        tokens: tuple[int, ...],
        values: tuple[float, ...],
        sources: Sequence[int],
        drafter: int,
    ) -> Expansion:
        if drafter:
            own = sources or (0,) * len(tokens)
            sources = [drafter * MOST_SOURCES + source for source in own]
        if self._options.calibrates_all or self._options.coupled or sources:
            return self._calibration.expansion(tokens, values, sources)
        return Expansion(tokens, values)

    # ---- verdicts --------------------------------------------------------------------------------

    def observe(self, tree: Tree, verdict: Verdict) -> None:
        """Give a verdict that has not been applied yet to the calibration."""
        for node, token in zip(verdict.accepted, verdict.tokens, strict=True):
            self._calibration.observe(tree[node], token)

    def commit(self, accepted: Sequence[Node], root: int, tree: Tree) -> None:
        """Make the nodes ``accepted``, the old root first, context, and ``root`` the root."""
        for cache in self._caches:
            cache.commit(accepted, root)
        if self._options.redrafts and self._caches and self._caches[self._active].refreshed:
            self._asked.stale = frozenset(self._asked.nodes)
            for node in tree:
                node.expansion = None
