"""Best rows first, as many as pay: a tree grown by value, a segment cut where a row costs more than
it brings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flowspec.core.best import BestGrowth
from flowspec.core.contest import Contest
from flowspec.core.controller import DECISIONS, Controller
from flowspec.core.experience import Experience, Trip
from flowspec.core.messages import Result
from flowspec.core.strategy import Growth, Occasion, Strategy, View
from flowspec.core.tree import Tree
from flowspec.strategies.base import check, or_auto


@dataclass(frozen=True, slots=True)
class AutoParams:
    """``rows`` of a segment and ``in_flight`` segments on their way: 0 or auto, chosen as the run
    goes. ``children``: candidates a node. ``coupled``: at a temperature, draft with the target's
    noise.
    """

    rows: int = or_auto(0)
    in_flight: int = or_auto(0)
    children: int = 32
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("rows", 0, 256), ("in_flight", 0, 64), ("children", 1, 64))


class Auto(Strategy):
    """The likeliest rows first, as many as pay by what is measured, in this job and those before
    it.
    """

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
        self.recall(Experience())

    def recall(self, experience: Experience, *, sampled: bool = False, drafters: int = 1) -> None:
        self.controller = Controller(self._stages, experience, self.params.rows)
        self.contest = Contest(drafters, experience.speeds[self.coupled and sampled, sampled])
        self.drafter = self.contest.drafter
        self._drafters = [(0, self.contest.drafter)]

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        self._choose(view)
        plan = self.controller.plan(view.covering, view.draft_seconds)
        self.capacity = self.params.in_flight or plan.in_flight
        return _Priced(plan.rows, max(plan.rows, 4), plan.passes, self.controller)

    def _choose(self, view: View) -> None:
        before = self.drafter
        self.drafter = self.contest.decoded(view.decoded, view.decode_seconds)
        if self.drafter != before and len(self._drafters) < DECISIONS:
            self._drafters.append((view.decoded, self.drafter))

    @property
    def decisions(self) -> list[dict[str, object]]:
        sizes: list[dict[str, object]] = [
            {"segments": segments, "rows": rows} for segments, rows in self.controller.decisions
        ]
        chosen: list[dict[str, object]] = [
            {"tokens": tokens, "drafter": drafter} for tokens, drafter in self._drafters
        ]
        return [*sizes, *chosen] if self.contest.several else sizes

    def heard(self, view: View, result: Result, trip: Trip | None) -> None:
        if trip is not None and not view.planted:
            self.controller.prefilled(trip, result.seconds)
        elif trip is not None:
            self.controller.hear(result, trip, tokens=view.decoded, seconds=view.decode_seconds)


def named(stats: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
    """A job's ``stats`` with names from ``drafters``, as far as they go, where its decisions have
    numbers.
    """
    if "decisions" not in stats:
        return dict(stats)
    names = dict[Any, str](enumerate(drafters))
    decisions = [
        {**entry, "drafter": names.get(entry["drafter"], entry["drafter"])}
        if "drafter" in entry
        else entry
        for entry in stats["decisions"]
    ]
    return {**stats, "decisions": decisions}


def drafted(stats: Mapping[str, Any]) -> dict[Any, int]:
    """How many of a job's tokens after the first were made with which drafter, as its ``decisions``
    call it; empty where there was nothing to choose. Tokens after the last change there was room
    to write down are nobody's.
    """
    changes = [
        (entry["tokens"], entry["drafter"])
        for entry in stats.get("decisions") or ()
        if "drafter" in entry
    ]
    if changes and len(changes) < DECISIONS:
        changes.append((stats["tokens"] - 1, None))
    made: Counter[Any] = Counter()
    for (begin, drafter), (end, _) in pairwise(changes):
        made[drafter] += max(0, end - begin)
    return dict(made)


class _Priced(BestGrowth):
    """Rows at the controller's prices; it hears how many were chosen."""

    def __init__(self, rows: int, batch: int, passes: int, controller: Controller) -> None:
        super().__init__(rows, batch, passes, None if controller.fixed else controller.price)
        self._controller = controller

    def segments(self, tree: Tree) -> list[list[int]]:
        found = super().segments(tree)
        for segment in found:
            self._controller.chose(len(segment))
        return found
