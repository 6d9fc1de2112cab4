"""Naive pipelining plus judgement of every segment as it returns, and pruning of what
is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.job.strategy import Occasion, View
from flowspec.strategies.base import BeamParams, BeamStrategy


@dataclass(frozen=True, slots=True)
class PrunedParams(BeamParams):
    """The paper's ablation has generation order here (``algorithms.md`` 9.10); score order is an
    option.
    """

    order: str = "generation"


class PrunedPP(BeamStrategy[PrunedParams]):
    """naive_pp plus a verdict per segment and pruning in flight; a round ends where
    its tree does.
    """

    Params = PrunedParams
    source = "FlowSpec (baseline)"

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return self.seed(view.tree) if occasion is Occasion.ROUND else None
