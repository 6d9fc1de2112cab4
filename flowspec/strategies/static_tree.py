"""SpecInfer in a pipeline (STPP): a tree of fixed shape as one batch, verified as a whole,
repeated.

Source: SpecInfer section 6.1 (the shape), PipeDec and SpecPipe (the baseline);
docs/algorithms.md#static-tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.ahead_growth import AheadGrowth
from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import StaticGrowth
from flowspec.core.protocol.messages import Answer
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.errors import ConfigError

#: Nodes of a tree, the root excluded.
MOST_NODES = 512
#: With ``overlap``: trees drafted ahead, and the least number of candidates per node.
AHEAD_ROOTS = 8
AHEAD_WIDTH = 4
#: Shapes worth trying: chains, then ever bushier trees of 1 to 8 levels.
SHAPES = (
    "1",
    "1-1",
    "1-1-1",
    "1-1-1-1",
    "1-1-1-1-1-1",
    "1-1-3-1-1-1-1-1",
    "2-1-1",
    "2-2-1-1",
    "3-2-1-1-1",
    "2-2-2-1-1-1-1",
    "4-2-2-1-1-1",
    "6-3-2-1-1",
    "8-4-2-1-1",
    "16-4-2-1",
)


@dataclass(frozen=True, slots=True)
class StaticParams:
    """``shape``: children of every node, level by level; 1-1-3-1-1-1-1-1 has levels of 1, 1, 3, 3,
    3, 3, 3 and 3 nodes, 20 in all. ``overlap``: draft trees of likely next rounds while a tree is
    verified. ``coupled``: at a temperature, draft with the target's noise.
    """

    shape: str = "1-1-3-1-1-1-1-1"
    overlap: bool = False
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
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {"shape": SHAPES, "overlap": ("off", "on")}
    starts: ClassVar[tuple[str, ...]] = (
        *("shape=1-1-1", "shape=2-2-1-1", "shape=8-4-2-1-1"),
        "shape=2-2-2-1-1-1-1,overlap=on",
    )

    def __init__(self, params: StaticParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.coupled = params.coupled
        self.draft_width = max(params.branching)
        self._trip_seconds = 0.0  # the shortest round trip of a tree so far
        if params.overlap:
            self.draft_width = max(self.draft_width, AHEAD_WIDTH)
            self.accepts_unsent = True
            self.redrafts = False  # the trees ahead are drafted before the verdict
            # The second slot stays empty: with it the session asks for a growth on IDLE while the
            # tree is in flight.
            self.max_in_flight = 2

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        branching = self.params.branching
        if occasion is not Occasion.IDLE:
            return StaticGrowth(view.tree, branching)
        passes = self._passes_ahead(view)
        return AheadGrowth(view.tree, branching, AHEAD_ROOTS, passes) if passes else None

    def observe_answer(self, view: View, answer: Answer, trip: RoundTrip | None) -> None:
        if trip is not None and view.decoding:
            known = self._trip_seconds or trip.seconds
            self._trip_seconds = min(known, trip.seconds)

    def _passes_ahead(self, view: View) -> int:
        """Drafter passes for the trees ahead: as many as end before the tree in flight returns.

        A pass that ended later would delay the next tree. 0 while no tree has returned.
        """
        if not self.params.overlap or not self._trip_seconds:
            return 0
        most = len(self.params.branching) + 1
        if view.draft_pass_seconds * most <= self._trip_seconds:
            return most
        return int(self._trip_seconds / view.draft_pass_seconds)
