"""SpecPipe's two lossy modes: a draft may be accepted although the target chose another token.

They run only when named. Both change the distribution of the text, and every result of theirs says
so. Source: SpecPipe (docs/algorithms.md#lossy-modes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import LayerGrowth
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Node, Tree
from flowspec.strategies.base import check

#: How many of the target's best tokens are returned with every row.
TOP = 256


@dataclass(frozen=True, slots=True)
class LossyParams:
    """``width``: nodes per level. ``children``: candidates per node."""

    width: int = 64
    children: int = 16

    def __post_init__(self) -> None:
        check(self, ("width", 1, 128), ("children", 1, 64))


class LossyRelaxed(Strategy):
    """LOSSY: takes the target's most probable drafted child, if among its 256 best tokens."""

    Params: ClassVar[type[LossyParams]] = LossyParams
    source = "SpecPipe, arXiv 2504.04104 v2 (relaxed mode)"
    drafts_ahead = True
    redrafts = False
    top = TOP
    lossy = "relaxed"

    def __init__(self, params: LossyParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.draft_width = params.children
        self.max_in_flight = stages

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return LayerGrowth(view.tree, self.params.width, self.params.children)

    def decide(self, tree: Tree, node: Node, token: int) -> int:
        """The most probable of the children by the target's log-probabilities."""
        children = {child.token for child in _selected_children(tree, node)}
        return next((candidate for candidate, _ in node.top[:TOP] if candidate in children), token)


@dataclass(frozen=True, slots=True)
class NucleusParams(LossyParams):
    """``nucleus``: percent of the target's probability mass, at temperature 1 and among its 256
    best tokens, within which the draft may choose.
    """

    nucleus: int = 90

    def __post_init__(self) -> None:
        LossyParams.__post_init__(self)
        check(self, ("nucleus", 1, 100))


class LossyNucleus(LossyRelaxed):
    """LOSSY: takes the draft's most probable child, if in the target's nucleus."""

    Params = NucleusParams
    source = "SpecPipe, arXiv 2504.04104 v2 (nucleus mode)"
    lossy = "nucleus"

    def decide(self, tree: Tree, node: Node, token: int) -> int:
        """The draft's best child in the nucleus; the target's own token if there is none."""
        assert isinstance(self.params, NucleusParams)
        share = 0.0
        nucleus = set()
        for candidate, logprob in node.top[:TOP]:
            if share >= self.params.nucleus / 100:
                break
            nucleus.add(candidate)
            share += math.exp(logprob)
        sent = [child for child in _selected_children(tree, node) if child.token in nucleus]
        return max(sent, key=lambda child: (child.value, -child.id)).token if sent else token


def _selected_children(tree: Tree, node: Node) -> list[Node]:
    children = (tree[child] for child in node.children.values())
    return [child for child in children if child.selected]
