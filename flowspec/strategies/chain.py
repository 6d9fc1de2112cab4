"""Linear drafts with many windows in flight: what most users of pipelined speculation run today.

Windows of the draft's best continuation follow each other without waiting for answers; a wrong
guess makes everything behind it void, wherever it is. Source: PipeInfer (``algorithms.md`` 6),
and the asynchronous speculation of Shard and mesh-llm. How many windows are in flight follows
the link: enough to cover the way there and back, as measured, and no more, since what is in
flight behind a wrong guess is wasted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import deepest
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.base import check, or_auto


@dataclass(frozen=True, slots=True)
class ChainParams:
    """``window``: tokens a segment. ``in_flight``: windows on their way; 0 or auto: what covers the
    link. ``confidence``: a window ends early, in percent, where the draft's probability of
    getting so far falls below it. ``coupled``: at a temperature, draft with the target's noise.
    """

    window: int = 2
    in_flight: int = or_auto(0)
    confidence: int = 0
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("window", 1, 64), ("in_flight", 0, 64), ("confidence", 0, 99))


class Chain(Strategy):
    """Linear drafts, many windows in flight, stale ones cancelled, depth tuned to the link."""

    Params = ChainParams
    source = "PipeInfer, arXiv 2407.11798, and today's asynchronous drafting"
    ahead = True
    candidates = True
    width = 4  # of several drafters the best valued one leads

    def __init__(self, params: ChainParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self.stages = stages
        self.capacity = params.in_flight or stages
        self.least = math.log(params.confidence / 100) if params.confidence else -math.inf

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        if not self.params.in_flight and view.covering:
            self.capacity = min(64, max(self.stages, view.covering))
        (tip,) = deepest(view.tree)
        return PathGrowth(view.tree, tip, self.params.window, _window, self.least)


def _window(tree: Tree, path: list[int]) -> list[list[int]]:
    root = [] if tree[tree.root].selected else [tree.root]
    window = [*root, *(node for node in path if node != tree.root)]
    return [window] if window else []
