"""SpecInfer in a pipeline (STPP): a tree of fixed shape as one batch, verified as a whole,
repeated.

Source: SpecInfer section 6.1 (the shape), PipeDec and SpecPipe (the baseline);
docs/algorithms.md#static-tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import StaticGrowth
from flowspec.core.job.strategy import Occasion, Strategy, View
from flowspec.errors import ConfigError

#: Nodes of a tree, the root excluded.
MOST_NODES = 512


@dataclass(frozen=True, slots=True)
class StaticParams:
    """``shape``: children of every node, level by level; 1-1-3-1-1-1-1-1 has levels of 1, 1, 3, 3,
    3, 3, 3 and 3 nodes, 20 in all. ``coupled``: at a temperature, draft with the target's noise.
    """

    shape: str = "1-1-3-1-1-1-1-1"
    coupled: bool = True

    def __post_init__(self) -> None:
        if not self.branching or not all(1 <= children <= 16 for children in self.branching):
            raise ConfigError(
                f"strategy option shape is {self._brief!r}; "
                "expected 1 to 16 children per level, like 1-1-3-1"
            )
        nodes = 0
        level = 1
        for children in self.branching:
            level *= children
            nodes += level
            if nodes > MOST_NODES:
                raise ConfigError(
                    f"strategy option shape is {self._brief}, which has too many nodes; "
                    f"expected at most {MOST_NODES}"
                )

    @property
    def branching(self) -> tuple[int, ...]:
        """Children per node, by level; empty unless ``shape`` lists one- or two-digit numbers."""
        parts = self.shape.split("-")
        numbers = all(part.isascii() and part.isdigit() and len(part) <= 2 for part in parts)
        return tuple(map(int, parts)) if numbers else ()

    @property
    def _brief(self) -> str:
        """``shape``, shortened for a message."""
        return self.shape if len(self.shape) <= 40 else f"{self.shape[:40]}..."


class StaticTree(Strategy):
    """A static tree of 20 nodes per round, as one segment, verified as a whole."""

    Params = StaticParams
    source = "SpecInfer, arXiv 2305.09781 (STPP in PipeDec)"

    def __init__(self, params: StaticParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self.draft_width = max(params.branching)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return (
            StaticGrowth(view.tree, self.params.branching) if occasion is Occasion.ROUND else None
        )
