"""Best rows first, as many as pay: a tree grown by value, its segments sized by what passes cost and hit."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.best import BestGrowth
from flowspec.core.controller import Controller
from flowspec.core.messages import Result
from flowspec.core.strategy import Growth, Occasion, Strategy, View
from flowspec.strategies.base import check, or_auto


@dataclass(frozen=True, slots=True)
class AutoParams:
    """``rows`` of a segment and ``in_flight`` segments on their way: 0 or auto, chosen as the run goes.
    ``children``: candidates a node. ``coupled``: at a temperature, draft with the target's noise."""

    rows: int = or_auto(0)
    in_flight: int = or_auto(0)
    children: int = 32
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("rows", 0, 256), ("in_flight", 0, 64), ("children", 1, 64))


class Auto(Strategy):
    """The likeliest rows first, sized and paced by what is measured while the job runs."""

    Params = AutoParams
    source = "this project"
    ahead = True
    redrafts = False

    def __init__(self, params: AutoParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.width, self.coupled = params.children, params.coupled
        self.capacity = params.in_flight or stages
        self.controller = Controller(stages, params.rows)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        plan = self.controller.plan(view.covering, view.draft_seconds)
        self.capacity = self.params.in_flight or plan.in_flight
        return BestGrowth(plan.rows, max(plan.rows, 4), plan.passes)

    @property
    def decisions(self) -> list[dict[str, object]]:
        return [{"verdicts": verdicts, "rows": rows} for verdicts, rows in self.controller.decisions]

    def heard(self, view: View, result: Result, rows: int) -> None:
        if view.planted:
            self.controller.hear(view.tree, result, rows)
