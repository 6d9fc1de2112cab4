"""Plain decoding through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.session.pacing import Lockstep
from flowspec.core.session.strategy import Strategy


@dataclass(frozen=True, slots=True)
class NoDraft:
    """``lockstep``: accepted so that a comparison can set it for every strategy; with one segment
    in flight it changes nothing.
    """

    lockstep: bool = False


class Autoregressive(Strategy):
    """One token at a time through all stages, no speculation."""

    Params = NoDraft
    source = "every paper's baseline"

    def __init__(self, params: NoDraft, stages: int) -> None:
        super().__init__()
        if params.lockstep:
            self.pacing = Lockstep(stages)
