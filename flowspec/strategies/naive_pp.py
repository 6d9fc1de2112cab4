"""Naive pipelining: a drafted tree per round, sent in micro-segments, judged as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.run.limits import TREE_ROWS
from flowspec.core.session.strategy import Occasion, View
from flowspec.strategies.base import BeamParams, BeamStrategy


@dataclass(frozen=True, slots=True)
class NaiveParams(BeamParams):
    """As the paper runs it: generation order, N + 1 equal parts of any size."""

    segment: int = TREE_ROWS
    order: str = "generation"


class NaivePP(BeamStrategy[NaiveParams]):
    """A drafted tree per round in N+1 segments, judged when all of them have returned."""

    Params = NaiveParams
    source = "FlowSpec (baseline)"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **BeamStrategy.search,
        "segment": ("8", "16", "32", str(TREE_ROWS)),
        "order": ("generation", "score"),
    }

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return self.seed(view) if occasion is Occasion.ROUND else None

    def may_judge(self, view: View) -> bool:
        return not view.in_flight and not view.waiting
