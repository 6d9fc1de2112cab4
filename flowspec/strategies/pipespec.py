"""PipeSpec: a chain of models, each of which drafts for the next, all working at the same time.

Source: PipeSpec (docs/algorithms.md#pipespec). The drafter drafts continuously; a middle model
verifies the draft so far, adds a token of its own and continues; the target verifies the last
model's text. Only a disagreement rolls a model back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.errors import ConfigError
from flowspec.strategies.base import check


@dataclass(frozen=True, slots=True)
class PipeSpecParams:
    """``lookahead``: a middle model starts when the model before it is ``lookahead - 1`` tokens
    ahead; 0: it never waits. ``window``: most rows of a segment that the target verifies, and most
    tokens that a draft runs ahead of the target. ``coupled``: at a temperature, draft with the
    target's noise.
    """

    lookahead: int = 0
    window: int = 100
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("lookahead", 0, 64), ("window", 2, 256))
        if self.lookahead > self.window:
            raise ConfigError(
                f"strategy option lookahead is {self.lookahead}; "
                f"expected at most the window, {self.window}"
            )


class PipeSpec(Strategy):
    """A chain of models, each verifying the one before it, each at its own speed."""

    Params = PipeSpecParams
    source = "PipeSpec, arXiv 2505.01572"
    drafts_ahead = True
    accepts_unsent = True
    uses_middles = True
    draft_width = 4  # the best candidate of several merged drafters leads

    def __init__(self, params: PipeSpecParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self._draft: PathGrowth | None = None
        self._tips: Mapping[int, int] = {}

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        tree = view.tree
        tip = self._drafted(tree)
        room = self._room(tree, tip)
        self._draft = PathGrowth(tree, tip, room, self._segments) if room > 0 else None
        return self._draft

    def next_for_middle(self, view: View, model: int, tip: int) -> int | None:
        """The text of the model before, if it continues this model's; else its own last token."""
        tree = view.tree
        below = self._tips[model - 1] if model > 1 else self._drafted(tree)
        ahead = tree[below].depth - tree[tip].depth if tip in tree.path(below) else 0
        if self._room(tree, tip) <= 0 or ahead < self.params.lookahead - 1:
            return None
        return below if ahead else tip

    def middles_advanced(self, view: View, tips: Mapping[int, int]) -> None:
        self._tips = tips
        if self._draft is not None and 1 in tips:
            self._draft.adopt(view.tree, tips[1])

    def _room(self, tree: Tree, tip: int) -> int:
        """How many tokens may still follow ``tip`` before the window is full."""
        return self.params.window - tree[tip].depth + tree[tree.root].depth

    def _drafted(self, tree: Tree) -> int:
        """The last node of the drafter's text."""
        tip = self._draft.tip if self._draft is not None else tree.root
        return tip if tip in tree else tree.root

    def _segments(self, tree: Tree, path: list[int]) -> list[list[int]]:
        """The unsent nodes of the last model's text, from the root on, as one segment."""
        last = self._tips[max(self._tips)] if self._tips else self._drafted(tree)
        fresh = [node for node in tree.path(last) if not tree[node].selected]
        return [fresh[: self.params.window]] if fresh else []
