"""PipeSpec: a chain of models, each drafting for the next and verified by it, none waiting for
another.

Source: PipeSpec (``algorithms.md`` section 5). The drafter drafts on without end; a middle model
verifies what is there, adds a token of its own and goes on; the target takes whatever lies
before it. Only a disagreement rolls anything back.
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
    """``lookahead``: tokens that must lie before a middle model's text until it starts, less one;
    0: it never waits for drafts. ``window``: rows a model verifies at most, and how far a draft
    runs ahead of the target. ``coupled``: at a temperature, draft with the target's noise.
    """

    lookahead: int = 0
    window: int = 100
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("lookahead", 0, 64), ("window", 2, 256))
        if self.lookahead > self.window:
            raise ConfigError(
                f"lookahead is {self.lookahead}; expected at most the window, {self.window}"
            )


class PipeSpec(Strategy):
    """A chain of models, each verifying the one before, all at their own speed."""

    Params = PipeSpecParams
    source = "PipeSpec, arXiv 2505.01572"
    ahead = True
    candidates = True
    middles = True
    width = 4  # of several drafters the best valued one leads

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

    def feed(self, view: View, model: int, tip: int) -> int | None:
        """What lies before it, if that goes on from its own text; its own last token alone
        otherwise.
        """
        tree = view.tree
        below = self._tips[model - 1] if model > 1 else self._drafted(tree)
        ahead = tree[below].depth - tree[tip].depth if tip in tree.path(below) else 0
        if self._room(tree, tip) <= 0 or ahead < self.params.lookahead - 1:
            return None
        return below if ahead else tip

    def verified(self, view: View, tips: Mapping[int, int]) -> None:
        self._tips = tips
        if self._draft is not None and 1 in tips:
            self._draft.adopt(view.tree, tips[1])

    def _room(self, tree: Tree, tip: int) -> int:
        """How much further than ``tip`` a text may run ahead of the target, in tokens."""
        return self.params.window - tree[tip].depth + tree[tree.root].depth

    def _drafted(self, tree: Tree) -> int:
        """Where the drafter's text ends."""
        tip = self._draft.tip if self._draft is not None else tree.root
        return tip if tip in tree else tree.root

    def _segments(self, tree: Tree, path: list[int]) -> list[list[int]]:
        """From the root to the end of the text before the target, as one segment."""
        last = self._tips[max(self._tips)] if self._tips else self._drafted(tree)
        fresh = [node for node in tree.path(last) if not tree[node].selected]
        return [fresh[: self.params.window]] if fresh else []
