"""``auto``: a tree grown by value, cut where a further row costs more than it adds."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.tree.tree import Tree
from flowspec.strategies.auto.best_first import BestFirstGrowth
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.drafter_bandit import DrafterBandit
from flowspec.strategies.auto.segment_sizing import MOST_DECISIONS, SegmentSizer
from flowspec.strategies.base import check, or_auto


@dataclass(frozen=True, slots=True)
class AutoParams:
    """``rows`` of a segment and ``in_flight`` segments: 0 or auto, chosen while the job runs.

    ``children``: candidates per node. ``coupled``: at a temperature, draft with the target's noise.
    """

    rows: int = or_auto(0)
    in_flight: int = or_auto(0)
    children: int = 32
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("rows", 0, 256), ("in_flight", 0, 64), ("children", 1, 64))


class Auto(Strategy):
    """The likeliest rows first, as many as pay by measured costs, of this job and earlier ones."""

    Params = AutoParams
    source = "this project"
    ahead = True
    redrafts = False
    calibrated = True
    chooses = True

    def __init__(self, params: AutoParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.width = params.children
        self.coupled = params.coupled
        self.capacity = params.in_flight or stages
        self._stages = stages
        self.recall(History())

    def recall(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        costs = history.recall(CostHistory)
        self.sizer = SegmentSizer(self._stages, costs, self.params.rows)
        self.bandit = DrafterBandit(drafters, costs.speeds[self.coupled and sampled, sampled])
        self.drafter = self.bandit.drafter
        self._drafter_changes = [(0, self.drafter)]  # (tokens before, drafter)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        self._choose_drafter(view)
        sizing = self.sizer.sizing(view.covering, view.draft_seconds)
        self.capacity = self.params.in_flight or sizing.in_flight
        return _SizedGrowth(sizing.rows, max(sizing.rows, 4), sizing.passes, self.sizer)

    def _choose_drafter(self, view: View) -> None:
        before = self.drafter
        self.drafter = self.bandit.update(view.decoded, view.decode_seconds)
        if self.drafter != before and len(self._drafter_changes) < MOST_DECISIONS:
            self._drafter_changes.append((view.decoded, self.drafter))

    @property
    def decisions(self) -> list[dict[str, object]]:
        decisions: list[dict[str, object]] = [
            {"segments": segments, "rows": rows} for segments, rows in self.sizer.decisions
        ]
        if self.bandit.has_choice:
            decisions += [
                {"tokens": tokens, "drafter": drafter} for tokens, drafter in self._drafter_changes
            ]
        return decisions

    def heard(self, view: View, result: Answer, trip: RoundTrip | None) -> None:
        if trip is not None and not view.planted:
            self.sizer.prefilled(trip, result.seconds)
        elif trip is not None:
            self.sizer.observe(result, trip, tokens=view.decoded, seconds=view.decode_seconds)


class _SizedGrowth(BestFirstGrowth):
    """Rows at the sizer's prices; the sizer is told how many were chosen."""

    def __init__(self, rows: int, batch: int, passes: int, sizer: SegmentSizer) -> None:
        super().__init__(rows, batch, passes, None if sizer.fixed_rows else sizer.price)
        self._sizer = sizer

    def segments(self, tree: Tree) -> list[list[int]]:
        found = super().segments(tree)
        for segment in found:
            self._sizer.chose(len(segment))
        return found
