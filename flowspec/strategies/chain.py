"""Linear drafts with many windows in flight: a common form of pipelined speculation.

Windows of the draft's best continuation follow each other without waiting for answers; a rejected
token voids everything behind it. The number of windows in flight follows the measured round trip:
enough to hide it and no more, since everything in flight behind a rejected token is wasted.
Source: PipeInfer (docs/algorithms.md#chain), and the asynchronous speculation of Shard and
mesh-llm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import deepest
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.run.history import History
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.base import check, least_score, or_auto

#: Most windows in flight where the strategy chooses.
MOST_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class ChainParams:
    """``window``: tokens per segment. ``in_flight``: windows in flight; 0 or auto: as many as hide
    the round trip. ``confidence``: percent; a window ends before a token whose path the draft
    gives a lower probability. ``coupled``: at a temperature, draft with the target's noise.
    """

    window: int = 2
    in_flight: int = or_auto(0)
    confidence: int = 0
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("window", 1, 64), ("in_flight", 0, MOST_IN_FLIGHT), ("confidence", 0, 99))


class WindowHistory:
    """By tokens per window, the number of windows in flight that hid the round trip last."""

    def __init__(self) -> None:
        self.in_flight: dict[int, int] = {}


class Chain(Strategy):
    """Linear drafts, as many windows in flight as hide the round trip, stale ones cancelled."""

    Params = ChainParams
    source = "PipeInfer, arXiv 2407.11798, and today's asynchronous drafting"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "window": ("1", "2", "3", "4", "5", "6", "7", "8"),
        "in_flight": ("auto", "2", "3", "4", "6", "8", "12", "16"),
        "confidence": ("0", "10", "20", "30", "50", "70"),
    }
    starts: ClassVar[tuple[str, ...]] = ("window=1", "window=4,confidence=30", "in_flight=8")
    drafts_ahead = True
    accepts_unsent = True
    draft_width = 4  # of several merged drafters the best candidate leads

    def __init__(self, params: ChainParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self.stages = stages
        self.use_history(History())
        self.least = least_score(params.confidence)

    def use_history(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        self._known = history.get(WindowHistory).in_flight
        before = self._known.get(self.params.window, self.stages)
        self.max_in_flight = self.params.in_flight or before

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        if not self.params.in_flight and view.bandwidth_delay:
            windows = min(MOST_IN_FLIGHT, max(self.stages, view.bandwidth_delay))
            self.max_in_flight = self._known[self.params.window] = windows
        (tip,) = deepest(view.tree)
        return PathGrowth(view.tree, tip, view.at_most(self.params.window), _window, self.least)


def _window(tree: Tree, path: list[int]) -> list[list[int]]:
    root = [] if tree[tree.root].selected else [tree.root]
    window = [*root, *(node for node in path if node != tree.root)]
    return [window] if window else []
