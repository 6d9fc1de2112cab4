"""The current growth of one run, and the drafter passes it needs.

One drafter drafts at a time; the others lag and catch up when they are chosen (``drafter_cache``).
A refreshed drafter's proposals are dropped at every verdict, unless the strategy's ``redrafts`` is
False. A block drafter's pass answers for several levels: the nodes of the levels below an asked one
have their proposals without a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from flowspec.core.drafting.block_stems import block_stems
from flowspec.core.drafting.calibration import Calibration, Calibrations
from flowspec.core.drafting.drafter_cache import CATCH_UP_ROWS, DrafterCache
from flowspec.core.drafting.growth import Growth
from flowspec.core.protocol.work import (
    BlockDone,
    BlockDraft,
    Draft,
    DraftDone,
    Kept,
    LevelProposals,
)
from flowspec.core.run.key import RunKey
from flowspec.core.tree.accept import Verdict
from flowspec.core.tree.tree import Expansion, Node, Tree
from flowspec.errors import ProtocolError, StateError

#: Most tree rows a drafter holds beyond the context; a growth that needs more ends early.
DRAFT_TREE_ROWS = 2048
#: Rows that a drafter lags behind a text that is decoded plainly, before it catches up: a pass for
#: every token would take a core from the stages, one over all of them delays the drafting.
RESTING_ROWS = 16
#: Most recent answering passes of a drafter whose times count.
PASS_SAMPLES = 32
#: Most sources merged into one drafter; a source's number is unique over all drafters.
MOST_SOURCES = 16


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """How to draft for a run.

    ``width``: continuations per node; 0: the run has no drafter. ``coupled``: the drafter sees the
    target's noise. ``refreshed``: per available drafter, whether it drafts from hidden rows.
    ``levels``: per available drafter, as in ``Limits``. ``redrafts``: drop a refreshed drafter's
    proposals at every verdict. ``calibration``: the model that gives coupled candidates and those
    with a source number their values; None: a new one.
    ``calibrates_all``: it gives all others theirs, too.
    """

    width: int
    coupled: bool = False
    refreshed: tuple[bool, ...] = (False,)
    levels: tuple[int, ...] = ()
    redrafts: bool = True
    calibration: Calibration | None = None
    calibrates_all: bool = False


@dataclass(slots=True)
class _Asked:
    """Nodes of the pass in progress, and the drafter that computes it.

    ``stale``: nodes whose proposals a verdict has voided since the pass began. ``passed``: by node
    that a verdict has made context since, how far above the root it is; a block answers for the
    levels below the root, too.
    """

    nodes: tuple[int, ...] = ()
    drafter: int = 0
    stale: frozenset[int] = frozenset()
    passed: dict[int, int] = field(default_factory=dict)


class Drafting:
    """The growth and the drafters' rows of ``run``, whose text so far is ``prefix``.

    ``held``: rows of it that each drafter has from the start; empty: none.
    """

    def __init__(
        self,
        run: RunKey,
        prefix: Sequence[int],
        options: DraftingOptions,
        held: Sequence[int] = (),
    ) -> None:
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
        none = (0,) * len(options.refreshed)
        columns = (options.refreshed, options.levels or none, held or none)
        self._caches = [
            DrafterCache(prefix, refreshed=refreshed, levels=count, held=rows)
            for refreshed, count, rows in (zip(*columns, strict=True) if options.width else ())
        ]
        self._passes = [deque[float](maxlen=PASS_SAMPLES) for _ in options.refreshed]
        self._active = 0
        self._rests = False

    @property
    def growing(self) -> bool:
        """Whether there is a growth that has not been collected."""
        return self._growth is not None

    @property
    def has_work(self) -> bool:
        """Whether a pass could start now."""
        if self._asked.nodes or not self._caches:
            return False
        if self._wanted:
            return True
        cache = self._caches[self._next_drafter]
        # Other runs may wait for a prompt's rows.
        rests = self._rests and cache.has_prompt and cache.lag < RESTING_ROWS
        return cache.lags and not rests

    @property
    def computed(self) -> tuple[int, ...]:
        """Rows of the text that each drafter has computed."""
        return tuple(cache.computed for cache in self._caches)

    def catches_up(self, rows: int) -> bool:
        """Whether the active drafter has yet to compute some of the text's first ``rows`` rows.

        Only one that drafts from the target's hidden rows: others need no one else's rows.
        """
        cache = self._caches[self._active] if self._caches else None
        return cache is not None and cache.refreshed and cache.computed < rows

    def keep(self, most: int) -> tuple[Kept, ...]:
        """Each drafter's rows of the text to keep, at most ``most``; for the end of the run."""
        return tuple(cache.keep(most) for cache in self._caches)

    def share(self, most: int) -> tuple[Kept, ...]:
        """Each drafter's first rows of the text, at most ``most``, while the run goes on."""
        return tuple(cache.share(most) for cache in self._caches)

    @property
    def waiting_rows(self) -> int:
        """Rows of the next pass, before the paths of a block drafter's blocks are added."""
        if not self._caches:
            return 0
        drafter = self._next_drafter
        cache = self._caches[drafter]
        wanted = len(self._wanted) if drafter == self._active else 0
        return min(cache.lag, CATCH_UP_ROWS) + wanted * (1 + cache.levels)

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
        """Median seconds of a recent answering pass of the active drafter; 0: it has made none."""
        return median(self._passes[self._active] or (0.0,))

    @property
    def least_pass_seconds(self) -> float:
        """As ``pass_seconds``, of the shortest one."""
        return min(self._passes[self._active], default=0.0)

    # ---- the growth ------------------------------------------------------------------------------

    def begin(
        self, growth: Growth | None, *, idle: bool, drafter: int = 0, rests: bool = False
    ) -> None:
        """Replace the current growth by ``growth``; the tree keeps its expansions.

        ``drafter``: the number of the drafter for this growth. A pass in progress ends with its own
        drafter. ``rests``: nothing is drafted for now. StateError if the strategy drafts nothing.
        """
        if growth is not None and not self._caches:
            raise StateError("the strategy grows the tree, but its draft_width is 0")
        self._growth = growth
        self.began_idle = idle
        self._active = drafter
        self._rests = rests
        self._growth_passes = 0
        self._wanted = ()

    def needs_drafter(self, tree: Tree) -> bool:
        """Proceed with the current growth; whether it needs the drafter before it can go on."""
        if self._growth is None:
            return False
        cache = self._caches[self._active]
        wanted = self._growth.proceed(tree)
        self._wanted = tuple(
            block_stems(tree, wanted, cache.levels)
            if cache.levels
            else cache.with_ancestors(tree, wanted)
        )
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
        cache = self._caches[drafter]
        found = cache.next_part(self._run, tree, wanted)
        if found is None:
            return None
        part, nodes = found
        self._asked = _Asked(nodes, drafter)
        growth_pass = self._growth_passes
        if nodes:
            self._wanted = ()
            self._growth_passes += 1
        width = self._options.width
        coupled = self._options.coupled
        if cache.levels:
            return BlockDraft(part, width, growth_pass, coupled, drafter, cache.levels)
        return Draft(part, width, growth_pass, coupled, drafter)

    def done(self, result: DraftDone, tree: Tree, seconds: float = 0.0) -> None:
        """Take the proposals of a pass of ``seconds``, except those for pruned or stale nodes."""
        asked = self._asked
        self._asked = _Asked()
        rows = len(asked.nodes)
        answered = len(result.tokens) == len(result.values) == rows
        if not answered or len(result.sources) not in (0, rows):
            raise ProtocolError("the drafter did not answer for the rows it was asked for")
        if asked.nodes:
            self._passes[asked.drafter].append(seconds)
        # Deepest first: a block knows more of its own path than one from further up.
        for at, node in reversed(list(enumerate(asked.nodes))):
            levels = _levels(result, at)
            if any(len(set(level.tokens)) != len(level.tokens) for level in levels):
                raise ProtocolError(f"the drafter proposed a token twice after node {node}")
            above = asked.passed.get(node, 0)
            below = tree.root if above else node
            if below not in tree or node in asked.stale or above >= len(levels):
                continue
            sources = result.sources[at] if result.sources else ()
            if not above or tree[below].expansion is None:
                tree.expand(below, self._expansion(levels, sources, asked.drafter, above))

    def _expansion(
        self, levels: Sequence[LevelProposals], sources: Sequence[int], drafter: int, first: int
    ) -> Expansion:
        """The proposals of ``levels`` from ``first`` on, each below those before it.

        A block drafter's level is its source number: the further ahead, the less is known.
        """
        below: Expansion | None = None
        for number in reversed(range(first, len(levels))):
            level = levels[number]
            is_block = len(levels) > 1
            numbers = (min(number, MOST_SOURCES - 1),) * len(level.tokens) if is_block else sources
            expansion = self._valued(level, numbers, drafter)
            below = expansion if below is None else replace(expansion, below=below)
        assert below is not None
        return below

    def _valued(self, level: LevelProposals, sources: Sequence[int], drafter: int) -> Expansion:
        if drafter:
            own = sources or (0,) * len(level.tokens)
            sources = [drafter * MOST_SOURCES + source for source in own]
        if self._options.calibrates_all or self._options.coupled or sources:
            return self._calibration.expansion(level.tokens, level.values, sources)
        return Expansion(level.tokens, level.values)

    # ---- verdicts --------------------------------------------------------------------------------

    def observe(self, tree: Tree, verdict: Verdict) -> None:
        """Give a verdict that has not been applied yet to the calibration."""
        for node, token in zip(verdict.accepted, verdict.tokens, strict=True):
            self._calibration.observe(tree[node].expansion, token)

    def commit(self, accepted: Sequence[Node], root: int, tree: Tree) -> None:
        """Make the nodes ``accepted``, the old root first, context, and ``root`` the root."""
        for cache in self._caches:
            cache.commit(accepted, root)
        self._pass_root(accepted, root, tree)
        if self._options.redrafts and self._caches and self._caches[self._active].refreshed:
            self._asked.stale = frozenset(self._asked.nodes)
            for node in tree:
                node.expansion = None

    def _pass_root(self, accepted: Sequence[Node], root: int, tree: Tree) -> None:
        """Note where the asked nodes lie that became context, unless the root was planted anew."""
        within = root in tree and tree[root].depth > 0
        if not within:
            self._asked.passed.clear()
            return
        moved = len(accepted)
        passed = {node: above + moved for node, above in self._asked.passed.items()}
        path = {node.id: moved - at for at, node in enumerate(accepted)}
        passed.update((node, path[node]) for node in self._asked.nodes if node in path)
        self._asked.passed = passed


def _levels(result: DraftDone, at: int) -> tuple[LevelProposals, ...]:
    """The proposals for the asked row ``at``: one level, or those of its block."""
    first = LevelProposals(result.tokens[at], result.values[at])
    return (first, *result.below[at]) if isinstance(result, BlockDone) else (first,)
