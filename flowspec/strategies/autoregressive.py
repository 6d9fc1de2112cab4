"""Plain decoding through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.strategy import Growth, Occasion, View


@dataclass(frozen=True, slots=True)
class NoDraft:
    """``lockstep``: accepted for comparison's sake; with one segment in flight it changes nothing."""

    lockstep: bool = False


class Autoregressive:
    """One token at a time through all stages, no speculation."""

    Params = NoDraft
    source = "every paper's baseline"
    width = 0
    capacity = 1

    def __init__(self, params: NoDraft, stages: int) -> None:
        self.lockstep = params.lockstep

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        return None

    def judges(self, view: View) -> bool:
        return True
