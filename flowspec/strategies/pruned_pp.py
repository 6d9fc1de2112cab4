"""Naive pipelining with a verdict per segment and pruning in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.session.strategy import Occasion, View
from flowspec.strategies.base import BeamParams, BeamStrategy


@dataclass(frozen=True, slots=True)
class PrunedParams(BeamParams):
    """Generation order, as in the paper's ablation (docs/algorithms.md#pruned-pp)."""

    order: str = "generation"


class PrunedPP(BeamStrategy[PrunedParams]):
    """naive_pp plus a verdict per segment and pruning in flight; a miss ends the round."""

    Params = PrunedParams
    source = "FlowSpec (baseline)"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **BeamStrategy.search,
        "segment": ("4", "8", "16", "32", "64"),
        "order": ("generation", "score"),
    }

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return self.seed(view) if occasion is Occasion.ROUND else None
