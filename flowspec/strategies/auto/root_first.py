"""Best-first growth on a single stage, where a new root does not leave alone.

In a pipeline the root leaves at once, and what follows it fills the stages behind it. A single
stage would compute the root for a whole pass and find nothing else to judge: the text would be
decoded plainly. So the root leads the segment that holds the best of its descendants, many of them
drafted during the pass before. While the stage is idle, a pass of the drafter has to promise more
tokens than the job makes in its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flowspec.core.drafting.layered_growth import missing
from flowspec.core.tree.tree import Node, Tree
from flowspec.strategies.auto.best_first import SIZES, BestFirstGrowth
from flowspec.strategies.auto.cost_history import CostHistory


class RootFirstGrowth(BestFirstGrowth):
    """One segment of the root, unless it is sent, and of at most ``rows`` - 1 best nodes.

    ``price``: of a segment with all its rows, as in ``BestFirstGrowth``; a row pays by what it adds
    to the price of the root alone. ``pass_price``: tokens that the job makes during a pass of the
    drafter; 0: unknown. ``costs``: keeps what passes over leaves have promised, by which a further
    one is judged.
    """

    #: With the root the segment has a size that is measured exactly.
    sizes = frozenset(size - 1 for size in SIZES)
    #: The root is sent in any case, so rows that cost more than they add stay behind.
    least_gain = 0.0

    def __init__(
        self,
        rows: int,
        batch: int,
        passes: int,
        price: Callable[[int], float] | None,
        pass_price: float,
        costs: CostHistory,
    ) -> None:
        super().__init__(rows - 1, batch, passes, _beside_root(price))
        self._pass_price = pass_price
        self._costs = costs
        self._overtaken = False

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """As in ``BestFirstGrowth``; while the root waits, only passes that pay."""
        if self._asked and not missing(tree, self._asked):
            self._costs.note_reach(_reach(tree, self._asked))
        asked = super().proceed(tree)
        if asked and tree.root not in tree.sent and not self._pays(tree, asked):
            self._passes = 0
            self._asked = asked = ()
        return asked

    def _pays(self, tree: Tree, leaves: tuple[int, ...]) -> bool:
        """Whether a pass over ``leaves`` can gain more than itself and one more row cost.

        Before any pass has been timed, one does.
        """
        if not self._pass_price:
            return leaves == (tree.root,)
        row = 0.0 if self._price is None else self._price(1)
        return _needed(tree, leaves) * self._costs.reach > self._pass_price + row

    def segments(self, tree: Tree) -> list[list[int]]:
        """The root and the nodes that pay, as one segment; none if a verdict came first."""
        if self._overtaken:
            return []
        best, _ = self._best(tree)
        lead = [] if tree.root in tree.sent else [tree.root]
        segment = lead + sorted(best[: self._paying_rows(tree, best)])
        return [segment] if segment else []

    def _known(self, tree: Tree) -> list[Node]:
        """T, or the root alone: it may have been a candidate that was never sent."""
        return tree.selected() or [tree[tree.root]]

    def _for_lone_row(self, tree: Tree) -> tuple[int, ...]:
        """Nothing: a lone row is the root."""
        return ()

    def rebase(self, tree: Tree) -> None:
        """A verdict has moved the root: the growth that follows it drafts further and sends it."""
        super().rebase(tree)
        self._overtaken = tree.root not in tree.sent


def _chance(tree: Tree, node: int) -> float:
    """The probability that the text goes through ``node``."""
    return math.exp(tree[node].score - tree[tree.root].score)


def _needed(tree: Tree, leaves: tuple[int, ...]) -> float:
    """Expected number of ``leaves`` that the text goes through."""
    return math.fsum(_chance(tree, leaf) for leaf in leaves)


def _reach(tree: Tree, drafted: tuple[int, ...]) -> float:
    """The mean probability of a node's best candidate, by the probability of needing it."""
    total = 0.0
    for node in drafted:
        expansion = tree[node].expansion
        assert expansion is not None
        best = math.exp(expansion.values[0]) if expansion.values else 0.0
        total += _chance(tree, node) * best
    return total / _needed(tree, drafted)


def _beside_root(price: Callable[[int], float] | None) -> Callable[[int], float] | None:
    """What ``rows`` rows add to the price of the root alone."""
    if price is None:
        return None
    return lambda rows: price(rows + 1) - price(1)
