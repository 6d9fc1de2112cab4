"""Synchronous speculative decoding: draft a window, verify it, repeat, one model at a time.

Source: PipeSpec's baselines (docs/algorithms.md#speculative), Leviathan et al. With middle
models the drafter fills the window; each middle model in turn verifies it and fills it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.base import check, least_score


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """``lookahead``: tokens of a window, the root included; each middle model may add one.
    ``confidence``: percent; the drafter ends a window with the first token whose path it gives a
    lower probability.
    ``coupled``: at a temperature, draft with the target's noise.
    """

    lookahead: int = 8
    confidence: int = 0
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("lookahead", 2, 64), ("confidence", 0, 99))


class Speculative(Strategy):
    """Draft a window, verify it, repeat; middle models verify and extend it in turn."""

    Params = SpeculativeParams
    source = "Leviathan et al., arXiv 2211.17192; PipeSpec (baseline)"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lookahead": ("2", "3", "4", "5", "6", "7", "8", "10", "12", "16"),
        "confidence": ("0", "20", "35", "50", "70"),
    }
    starts: ClassVar[tuple[str, ...]] = ("lookahead=4", "lookahead=5,confidence=35")
    uses_middles = True
    draft_width = 4  # the best candidate of several merged drafters leads

    def __init__(self, params: SpeculativeParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self._tips: Mapping[int, int] = {}
        self._drafted = -1
        self._turn = 0  # 0: the drafter's; then the middle models' in order; then the target's

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        tree = view.tree
        if occasion is Occasion.ROUND:
            self._turn = 0
            drafts, least = self.params.lookahead - 1, least_score(self.params.confidence)
            return PathGrowth(tree, tree.root, drafts, self._hand_on, least, keeps_last=True)
        if self._tips and self._turn > max(self._tips) and not view.in_flight:
            return PathGrowth(tree, tree.root, 0, self._whole)
        return None

    def next_for_middle(self, view: View, model: int, tip: int) -> int | None:
        """In the model's turn: the window of the model before, then its own last token until the
        window is full.
        """
        if model != self._turn:
            return None
        below = self._tips[model - 1] if model > 1 else self._drafted
        return below if tip in view.tree.path(below) else tip

    def middles_advanced(self, view: View, tips: Mapping[int, int]) -> None:
        tree = view.tree
        self._tips = tips
        full = tree[tree.root].depth + self.params.lookahead - 1
        while self._turn in tips and tree[tips[self._turn]].depth >= full:
            self._turn += 1

    def _hand_on(self, tree: Tree, path: list[int]) -> list[list[int]]:
        self._drafted = path[-1] if path else tree.root
        self._turn = 1
        return [] if self._tips else [[tree.root, *path]]

    def _whole(self, tree: Tree, path: list[int]) -> list[list[int]]:
        return [tree.path(self._tips[max(self._tips)])]
