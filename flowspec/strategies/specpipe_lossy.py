"""SpecPipe's two lossy modes: faster where the target would have said otherwise. Off unless asked
by name.

Source: SpecPipe section 4.2 of ``algorithms.md``. Both change the distribution of the text;
every result that comes from them says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import LayerGrowth
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.base import check

#: The target's best tokens that come back with every row.
TOP = 256


@dataclass(frozen=True, slots=True)
class LossyParams:
    """``width`` nodes of a level, ``children`` candidates a node."""

    width: int = 64
    children: int = 16

    def __post_init__(self) -> None:
        check(self, ("width", 1, 128), ("children", 1, 64))


class LossyRelaxed(Strategy):
    """LOSSY: the root's child the target likes best, of those among its 256 best; a miss if there
    is none.
    """

    Params: ClassVar[type[LossyParams]] = LossyParams
    source = "SpecPipe, arXiv 2504.04104 v2 (relaxed mode)"
    ahead = True
    redrafts = False
    top = TOP
    lossy = "relaxed"

    def __init__(self, params: LossyParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.width = params.children
        self.capacity = stages

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return LayerGrowth(view.tree, self.params.width, self.params.children)

    def decide(self, tree: Tree, node: int, token: int, top: Sequence[tuple[int, float]]) -> int:
        """The likeliest of the children, by the target's own log-probabilities."""
        children = _children(tree, node)
        return next((candidate for candidate, _ in top if candidate in children), token)


@dataclass(frozen=True, slots=True)
class NucleusParams(LossyParams):
    """``nucleus``: share of the target's probability, in percent, within which the draft may
    choose.
    """

    nucleus: int = 90

    def __post_init__(self) -> None:
        LossyParams.__post_init__(self)
        check(self, ("nucleus", 1, 100))


class LossyNucleus(LossyRelaxed):
    """LOSSY: of the root's children within the target's nucleus the draft's favourite;
    else a miss.
    """

    Params = NucleusParams
    source = "SpecPipe, arXiv 2504.04104 v2 (nucleus mode)"
    lossy = "nucleus"

    def decide(self, tree: Tree, node: int, token: int, top: Sequence[tuple[int, float]]) -> int:
        """The draft's favourite child in the nucleus; the target's own token if there is none
        (9.24).
        """
        assert isinstance(self.params, NucleusParams)
        share = 0.0
        nucleus = set()
        for candidate, logprob in top:
            if share >= self.params.nucleus / 100:
                break
            nucleus.add(candidate)
            share += math.exp(logprob)
        children = [tree[child] for name, child in tree[node].children.items() if name in nucleus]
        sent = [child for child in children if child.selected]
        return max(sent, key=lambda child: (child.value, -child.id)).token if sent else token


def _children(tree: Tree, node: int) -> set[int]:
    return {token for token, child in tree[node].children.items() if tree[child].selected}
