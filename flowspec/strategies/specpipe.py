"""SpecPipe: PipeDec's successor, a fixed-width tree that moves through the pipeline freely.

Source: SpecPipe (arXiv 2504.04104 v2); docs/algorithms.md#specpipe. One level enters per step;
prunes travel beside the rows, and every stage applies those it has before its next pass. Any
drafter may be the source of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import LayerGrowth
from flowspec.core.job.pass_times import PassTimes
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.session.pacing import Timestep
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.strategies.base import check, or_auto
from flowspec.strategies.width_tuner import WIDTHS, TunedGrowth, WidthHistory, WidthTuner


@dataclass(frozen=True, slots=True)
class SpecPipeParams:
    """``width``: nodes per level (w); 0 or auto: chosen while the job runs, by the expected time
    between tokens. ``children``: candidates per node (c). ``levels``: levels per segment (m).
    ``in_flight``: segments in flight; 0 or auto: one per stage. ``barrier``: PipeDec's timesteps.
    ``coupled``: at a temperature, draft with the target's noise.
    """

    width: int = or_auto(64)
    children: int = 16
    levels: int = 1
    in_flight: int = or_auto(0)
    barrier: bool = False
    coupled: bool = True

    def __post_init__(self) -> None:
        check(
            self,
            ("width", 0, 128),
            ("children", 1, 64),
            ("levels", 1, 8),
            ("in_flight", 0, 64),
        )


class SpecPipe(Strategy):
    """A fixed-width tree, one level per step, no barrier; prunes overtake the rows they void."""

    Params: ClassVar[type[SpecPipeParams]] = SpecPipeParams
    source = "SpecPipe, arXiv 2504.04104 v2"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        # 16, 21 and 32: four, three and two levels in the 64 rows of a GPU's tile.
        "width": (
            *("auto", "1", "2", "4", "8", "12", "16"),
            *("21", "32", "48", "64", "96", "128"),
        ),
        "levels": ("1", "2", "3", "4"),
        "in_flight": ("auto", "4", "5", "6", "8", "10", "12", "16"),
        "children": ("4", "8", "16", "32", "64"),
    }
    starts: ClassVar[tuple[str, ...]] = (
        "width=1",
        "width=auto",
        "width=32,levels=3",
        "width=21,levels=3",
        "levels=2,in_flight=8",
        "width=8,levels=2",
    )
    drafts_ahead = True
    redrafts = False

    def __init__(self, params: SpecPipeParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.draft_width = params.children
        self.coupled = params.coupled
        self.max_in_flight = params.in_flight or stages
        self._stages = stages
        self.tuner: WidthTuner | None = None
        self.use_history(History())
        if params.barrier:
            self.pacing = Timestep(stages, stages)

    def use_history(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        if not self.params.width:
            known = history.get(WidthHistory)
            shape = (self.params.children, self.params.levels)
            ranks = known.ranks[(self.coupled and sampled, sampled, *shape)]
            passes = history.get(PassTimes)
            self.tuner = WidthTuner(self._stages, self.params.levels, passes, ranks)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        tree = view.tree
        shape = self.params
        # Beside other jobs: levels in a segment first, then rows in a level.
        levels = view.at_most(shape.levels)
        most = max(1, view.rows // levels) if view.rows else WIDTHS[-1]
        if self.tuner is None:
            return LayerGrowth(tree, min(shape.width, most), shape.children, levels)
        if occasion is Occasion.ROUND:
            self.tuner.begin_round()
        return TunedGrowth(tree, self.tuner, (most, shape.children, levels))

    def observe_answer(self, view: View, answer: Answer, trip: RoundTrip | None) -> None:
        if self.tuner is None:
            return
        if view.decoding:
            self.tuner.observe(view.tree, answer, trip)
        elif trip is not None:
            self.tuner.prefilled(trip, answer)


@dataclass(frozen=True, slots=True)
class SpecPipeDBParams(SpecPipeParams):
    """As in ``SpecPipe``. The paper does not name the width of a request's level."""

    width: int = or_auto(16)


class SpecPipeDB(SpecPipe):
    """SpecPipe with dynamic batching of several requests, whatever their number.

    Every request keeps the width it would have alone; a stage takes the waiting levels of all of
    them into one pass, and a request that missed begins again at stage 1 while the others go on.
    """

    Params = SpecPipeDBParams
    source = "SpecPipe-DB, arXiv 2504.04104 v2"
    governed = False
