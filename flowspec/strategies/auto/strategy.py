"""``auto``: a tree grown best-first, cut where a further row costs more tokens than it adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.job.pass_times import PassTimes
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.auto.best_first import ALTERNATIVE, BestFirstGrowth
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.drafter_bandit import PLAIN, DrafterBandit, synchronous
from flowspec.strategies.auto.root_first import RootFirstGrowth
from flowspec.strategies.auto.segment_sizing import (
    DELAY_FACTOR,
    MOST_DECISIONS,
    MOST_PASSES,
    SegmentSizer,
)
from flowspec.strategies.auto.synchronous import SynchronousGrowth
from flowspec.strategies.base import check, or_auto

#: Nodes of a pass of the drafter if segments have fewer rows.
LEAST_BATCH = 4


@dataclass(frozen=True, slots=True)
class AutoParams:
    """``rows`` per segment, segments ``in_flight``: 0 or auto: chosen while the job runs.

    ``children``: candidates per node. ``coupled``: at a temperature, draft with the target's noise.
    ``delay``: seconds of the job per second that a segment occupies the slowest part.
    ``alternative``: how many times as probable as the chain's next row another must be to be sent
    alone before it.
    """

    rows: int = or_auto(0)
    in_flight: int = or_auto(0)
    children: int = 32
    coupled: bool = True
    delay: float = DELAY_FACTOR
    alternative: float = ALTERNATIVE

    def __post_init__(self) -> None:
        check(
            self,
            ("rows", 0, 256),
            ("in_flight", 0, 64),
            ("children", 1, 64),
            ("delay", 0, 100),
            ("alternative", 1, 1000),
        )


class Auto(Strategy):
    """The most probable rows first, as many as pay at the costs measured so far."""

    Params = AutoParams
    source = "this project"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "delay": ("0.5", "1.0", "2.0", "4.0"),
        "alternative": ("1.5", "3.0", "6.0"),
    }
    drafts_ahead = True
    redrafts = False
    calibrated = True
    chooses_drafter = True

    def __init__(self, params: AutoParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.draft_width = params.children
        self.coupled = params.coupled
        self.max_in_flight = params.in_flight or stages
        # A single stage takes a new root together with what was drafted below it.
        self.holds_root = self.accepts_unsent = stages == 1
        self._stages = stages
        self.use_history(History())

    def use_history(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        costs = history.get(CostHistory)
        costs.passes = history.get(PassTimes)
        self._costs = costs
        self.sizer = SegmentSizer(self._stages, costs, self.params.rows, self.params.delay)
        self._drafters = drafters
        # Rates beside other jobs, or with fixed rows, are not to be compared with plain decoding's.
        self._bandits = {
            free: DrafterBandit(
                drafters, costs.speeds[self.coupled and sampled, sampled, free], may_be_plain=free
            )
            for free in (True, False)
        }
        self.bandit = self._bandits[not self.sizer.fixed_rows]
        self._changes = [(0, self.bandit.choice)]  # (tokens before, choice)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        self._choose(view)
        if self.is_plain:
            return None
        if not self.drafts_ahead:
            # Segments that left before the choice are waited for.
            begins = occasion is Occasion.ROUND or not view.tree[view.tree.root].selected
            return self._synchronous(view) if begins else None
        sizing = self.sizer.sizing(view.bandwidth_delay, view.draft_pass_seconds)
        self.max_in_flight = self.params.in_flight or sizing.in_flight
        # Beside other jobs, the rows that a job may have cost nothing: none of them has a price.
        rows = view.at_most(self.params.rows) or view.rows or sizing.rows
        batch = max(rows, LEAST_BATCH)
        price = None if self.sizer.fixed_rows or view.rows else self.sizer.price
        growth: Growth
        if self.holds_root:
            growth = RootFirstGrowth(
                rows, batch, MOST_PASSES, price, self.sizer.pass_price, self._costs
            )
        else:
            growth = BestFirstGrowth(rows, batch, sizing.passes, price, self.params.alternative)
        return _SizedGrowth(growth, self.sizer)

    def _synchronous(self, view: View) -> Growth:
        rate = self.sizer.rate

        def cost(rows: int) -> float:
            return rate * self._in_pipeline(rows, self._costs.passes.at(rows))

        return SynchronousGrowth(cost, rate * view.draft_pass_seconds)

    def _in_pipeline(self, rows: int, seconds: float) -> float:
        """Seconds in which ``rows`` rows pass all links, and stages that take ``seconds`` each."""
        return self._stages * (seconds + rows * self._costs.row_seconds)

    def _choose(self, view: View) -> None:
        """Take a drafter, synchronously or not, or none.

        With fixed rows or beside other jobs there is one.
        """
        self._follow_share(view)
        choice = self.bandit.update(view.decoded, view.decode_seconds)
        self.is_plain = choice == PLAIN
        self.drafts_ahead = choice >= PLAIN
        if choice != PLAIN:
            self.drafter = choice if choice >= 0 else synchronous(choice)
        if choice != self._changes[-1][1] and len(self._changes) < MOST_DECISIONS:
            self._changes.append((view.decoded, choice))

    def _follow_share(self, view: View) -> None:
        """Choose among what may be chosen now; what a plain share decodes counts for nobody."""
        bandit = self._bandits[not (self.sizer.fixed_rows or view.rows)]
        if bandit is not self.bandit or view.rows == 1:
            self.bandit = bandit
            bandit.resume(view.decoded, view.decode_seconds)

    @property
    def decisions(self) -> list[dict[str, object]]:
        decisions: list[dict[str, object]] = [
            {"segments": segments, "rows": rows} for segments, rows in self.sizer.decisions
        ]
        if self._drafters > 1 or self._changes != [(0, 0)]:
            decisions += [
                {"tokens": tokens, "drafter": choice}
                if choice >= PLAIN
                else {"tokens": tokens, "drafter": synchronous(choice), "synchronous": True}
                for tokens, choice in self._changes
            ]
        return decisions

    def observe_answer(self, view: View, answer: Answer, trip: RoundTrip | None) -> None:
        if trip is None:
            return
        if view.decoding:
            self._follow_share(view)
            if trip.alone and trip.rows == 1 and not view.rows:
                self._bandits[True].note_lone_row(trip.seconds)
            self._note_candidate(view, answer)
            self.sizer.observe(answer, trip, tokens=view.decoded, seconds=view.decode_seconds)
        else:
            self.sizer.prefilled(trip, answer)

    def _note_candidate(self, view: View, answer: Answer) -> None:
        """Note whether the drafter's best candidate below the root is what the target chose."""
        root = view.tree[view.tree.root]
        drafting = view.least_draft_pass_seconds
        if root.expansion is None or root.id not in answer.ids or view.rows or not drafting:
            return
        self._bandits[True].note_candidate(
            self.drafter,
            right=root.expansion.tokens[:1] == (root.choice,),
            seconds=self._in_pipeline(1, self._costs.passes.least_of_second) + drafting,
        )


class _SizedGrowth:
    """``growth``, which tells ``sizer`` how many rows were chosen."""

    def __init__(self, growth: Growth, sizer: SegmentSizer) -> None:
        self._growth = growth
        self._sizer = sizer
        self.proceed = growth.proceed
        self.rebase = growth.rebase

    def segments(self, tree: Tree) -> list[list[int]]:
        found = self._growth.segments(tree)
        for segment in found:
            self._sizer.chose(len(segment))
        return found
