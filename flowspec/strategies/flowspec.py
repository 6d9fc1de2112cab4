"""FlowSpec: continuous pipelined speculation with a tree that is pruned and grown while in flight.

Source: FlowSpec (arXiv 2507.02620), sections 3.2 to 3.4; docs/algorithms.md#flowspec. Each
mechanism is a switch, so that the paper's ablation is configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.beam_growth import BeamGrowth, BeamSearch
from flowspec.core.drafting.growth import Growth
from flowspec.core.run.limits import TREE_ROWS
from flowspec.core.session.strategy import Occasion, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies.base import BeamParams, BeamStrategy, check


@dataclass(frozen=True, slots=True)
class FlowSpecParams(BeamParams):
    """The round's tree as in ``BeamParams``, and the two expansions.

    ``merge``: context-aware expansion. After every verdict that stays in the tree, draft again
    from the new root (``merge_loops``, ``merge_nodes``: d_exp, L_exp) and send the nodes that T
    lacks. ``expand``: score-aware expansion. When a slot is free and the context unchanged, grow
    the last beam by ``expand_layers`` (d_se) and send the ``expand_nodes`` (L_se) best that T
    lacks.
    """

    merge: bool = True
    merge_loops: int = 6
    merge_nodes: int = 64
    expand: bool = True
    expand_layers: int = 1
    expand_nodes: int = 48

    def __post_init__(self) -> None:
        # The zero-argument form of super() does not survive a dataclass with slots.
        BeamParams.__post_init__(self)
        most = TREE_ROWS // 2  # an expansion must fit beside the segments in flight
        check(
            self,
            ("merge_loops", 0, 32),
            ("merge_nodes", 1, most),
            ("expand_layers", 1, 32),
            ("expand_nodes", 1, most),
        )


class FlowSpec(BeamStrategy[FlowSpecParams]):
    """Score-ordered segments, judged one by one, pruned in flight and followed by expansions.

    N + 1 segments are in flight. Unless ``lockstep`` is on they run freely (``FreeRunning``): each
    answer is judged when it arrives, and the task graph is not used.
    """

    Params = FlowSpecParams
    source = "FlowSpec, arXiv 2507.02620"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "segment": ("1", "2", "4", "8", "16", "24", "32", "64"),
        **BeamStrategy.search,
        "merge_loops": ("1", "2", "3", "4", "6", "8"),
        "merge_nodes": ("4", "8", "16", "32", "64", "128"),
        "expand_nodes": ("2", "4", "8", "16", "32", "48", "96"),
        "expand_layers": ("1", "2", "3"),
        "merge": ("on", "off"),
        "expand": ("on", "off"),
        "order": ("score", "generation"),
    }
    starts: ClassVar[tuple[str, ...]] = (
        "segment=1,width=1,loops=4,nodes=4,merge_loops=4,merge_nodes=4,expand_nodes=2",
        "segment=8,width=4,loops=4,nodes=32,merge_loops=3,merge_nodes=16,expand_nodes=8",
        "segment=32,nodes=128,expand_nodes=96",
        "merge_loops=2",
    )

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        match occasion:
            case Occasion.ROUND:
                return self.seed(view)
            case Occasion.VERDICT if self.params.merge:
                return self._merge(view)
            case Occasion.IDLE if self.params.expand and self.base is not None:
                return self._expand(self.base, view)
        return None

    def _merge(self, view: View) -> Growth:
        """S_app: the new draft's nodes that T lacks, in its order, as one segment."""
        base = self.base = BeamSearch(view.tree, self.params.width, self.params.merge_loops)
        most = view.at_most(self.params.merge_nodes)

        def finish(tree: Tree) -> list[list[int]]:
            best = base.best(tree, self.params.merge_nodes, by_score=self.params.by_score)
            return _segment([node for node in best if not tree[node].selected][:most])

        return BeamGrowth(base, finish)

    def _expand(self, base: BeamSearch, view: View) -> Growth:
        """The best of the last beam's deeper layers that T lacks, as one segment."""
        base.rebase(view.tree)
        base.extend(view.tree, self.params.expand_layers)
        most = view.at_most(self.params.expand_nodes)

        def finish(tree: Tree) -> list[list[int]]:
            by_score = self.params.by_score
            return _segment(base.best(tree, most, by_score=by_score, unselected=True))

        return BeamGrowth(base, finish)


def _segment(nodes: list[int]) -> list[list[int]]:
    return [nodes] if nodes else []
