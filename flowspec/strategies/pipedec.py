"""PipeDec: a dynamic prediction tree, one layer of which enters the pipeline per timestep.

Source: PipeDec (arXiv 2504.04104 v1); docs/algorithms.md#pipedec. Every
timestep each stage group computes one layer and the drafter the next; a join of the task graph
waits for all of them; the verdict prunes; only then the new layer's nodes are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.drafting.layered_growth import LayerGrowth
from flowspec.core.session.pacing import Timestep
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.strategies.base import check, or_auto


@dataclass(frozen=True, slots=True)
class PipeDecParams:
    """``width``: most nodes per layer (w). ``children``: candidates per node (c). ``groups``:
    number of stage groups; the stages of a group compute one after another within a timestep; 0
    or auto: one stage per group. ``barrier``: the paper's timesteps; without it layers flow
    freely. ``coupled``: at a temperature, draft with the target's noise.
    """

    width: int = 32
    children: int = 16
    groups: int = or_auto(0)
    barrier: bool = True
    coupled: bool = True

    def __post_init__(self) -> None:
        check(self, ("width", 1, 128), ("children", 1, 64), ("groups", 0, 1024))


class PipeDec(Strategy):
    """A prediction tree that moves one layer per timestep: one token per timestep while it hits."""

    Params: ClassVar[type[PipeDecParams]] = PipeDecParams
    source = "PipeDec, arXiv 2504.04104 v1"
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "barrier": ("on", "off"),
        "width": ("1", "2", "4", "8", "16", "32", "64", "128"),
        "children": ("4", "8", "16", "32", "64"),
        "groups": ("auto", "1", "2", "3", "4", "6"),
    }
    starts: ClassVar[tuple[str, ...]] = (
        "barrier=off",
        "barrier=off,width=64",
        "barrier=off,width=1",
        "width=1",
    )
    drafts_ahead = True
    redrafts = False  # the layer drafted in a timestep is chosen at the end of that timestep

    def __init__(self, params: PipeDecParams, stages: int) -> None:
        super().__init__()
        self.params = params
        self.draft_width = params.children
        self.coupled = params.coupled
        self.max_in_flight = min(params.groups or stages, stages)
        if params.barrier:
            self.pacing = Timestep(stages, self.max_in_flight)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return LayerGrowth(view.tree, view.at_most(self.params.width), self.params.children)


@dataclass(frozen=True, slots=True)
class HeadParams(PipeDecParams):
    """As FlowSpec's authors ran it: 16 nodes per layer, 16 candidates per node."""

    width: int = 16


class PipeDecHead(PipeDec):
    """PipeDec as FlowSpec's authors compared it: width and children 16, for a draft head."""

    Params = HeadParams
    source = "FlowSpec, arXiv 2507.02620 (baseline)"
