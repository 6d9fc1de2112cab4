"""PipeSpec: a chain of models, each of which drafts for the next, all working at the same time.

Source: PipeSpec (docs/algorithms.md#pipespec). The drafter drafts continuously; a middle model
verifies the draft so far, adds a token of its own and continues; the target verifies the last
model's text. Only a disagreement rolls a model back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.errors import ConfigError
from flowspec.strategies.base import check


@dataclass(frozen=True, slots=True)
class PipeSpecParams:
    """``lookahead``: a middle model or the target starts when the model before it is
    ``lookahead - 1`` tokens ahead, or can get no further; 0: it never waits. ``window``: most rows
    of a segment that the target verifies, and most tokens that a draft runs ahead of the target.
    ``coupled``: at a temperature, draft with the target's noise.
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
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "window": ("2", "4", "6", "8", "12", "16", "32", "64", "100"),
        "lookahead": ("0", "2", "3", "4", "6", "8", "12"),
    }
    starts: ClassVar[tuple[str, ...]] = ("window=8", "window=16,lookahead=6")
    drafts_ahead = True
    accepts_unsent = True
    uses_middles = True
    draft_width = 4  # the best candidate of several merged drafters leads

    def __init__(self, params: PipeSpecParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        # A target that waits for drafts does so after a miss, too.
        self.holds_root = params.lookahead > 1
        self._draft: PathGrowth | None = None
        self._draft_ended = False  # the growth was collected, and none has followed it
        self._tips: Mapping[int, int] = {}

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        tree = view.tree
        tip = self._drafted(tree)
        room = self._room(tree, tip)
        due = self.may_collect(view)
        self._draft = PathGrowth(tree, tip, max(room, 0), self._segments)
        self._draft_ended = False
        return self._draft if room > 0 or due else None

    def may_collect(self, view: View) -> bool:
        """The target is idle, and the text of the model before it is long enough."""
        tree = view.tree
        return tree.root not in tree.sent and not self._waits(tree, self._target, tree.root)

    def next_for_middle(self, view: View, model: int, tip: int) -> int | None:
        """The text of the model before, if it continues this model's; else its own last token."""
        tree = view.tree
        if self._room(tree, tip) <= 0 or self._waits(tree, model, tip):
            return None
        return self._before(tree, model) if self._ahead(tree, model, tip) else tip

    def middles_advanced(self, view: View, tips: Mapping[int, int]) -> None:
        self._tips = tips
        if self._draft is not None and 1 in tips:
            self._draft.adopt(view.tree, tips[1])

    @property
    def _target(self) -> int:
        """The target's number in the chain; the drafter is 0."""
        return len(self._tips) + 1

    def _waits(self, tree: Tree, model: int, tip: int) -> bool:
        """Whether ``model``, whose text ends at ``tip``, waits for more of the text before it.

        It does not if the model before can get no further: they would wait for each other.
        """
        if self._ahead(tree, model, tip) >= self.params.lookahead - 1:
            return False
        before = self._before(tree, model)
        expansion = tree[before].expansion
        nothing_drafted = expansion is not None and not expansion.tokens
        stuck = model == 1 and (nothing_drafted or self._draft_ended)
        return self._room(tree, before) > 0 and not stuck

    def _ahead(self, tree: Tree, model: int, tip: int) -> int:
        """Tokens by which the text before ``model`` continues its own, which ends at ``tip``."""
        before = self._before(tree, model)
        return tree[before].depth - tree[tip].depth if tip in tree.path(before) else 0

    def _before(self, tree: Tree, model: int) -> int:
        """The last node of the text of the model before ``model``."""
        return self._tips[model - 1] if model > 1 else self._drafted(tree)

    def _room(self, tree: Tree, tip: int) -> int:
        """How many tokens may still follow ``tip`` before the window is full."""
        return self.params.window - tree[tip].depth + tree[tree.root].depth

    def _drafted(self, tree: Tree) -> int:
        """The last node of the drafter's text."""
        tip = self._draft.tip if self._draft is not None else tree.root
        return tip if tip in tree else tree.root

    def _segments(self, tree: Tree, path: list[int]) -> list[list[int]]:
        """The unsent nodes of the last model's text, from the root on, as one segment."""
        waits = self._waits(tree, self._target, tree.root)
        self._draft_ended = True
        if waits:
            return []
        last = self._before(tree, self._target)
        fresh = [node for node in tree.path(last) if node not in tree.sent]
        return [fresh[: self.params.window]] if fresh else []
