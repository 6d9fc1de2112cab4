"""Stages of one model, fed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowspec.core.protocol.messages import Open, Prune, Segment
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import StageRun, rows_of
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.arrays import to_array
from flowspec.model.weights.directory import ModelDirectory

RUN = RunKey("j", 1)


class StageByStage:
    """Consecutive stages of ``directory`` that return logits; ``prompt``: rows of the prompt."""

    def __init__(
        self,
        directory: ModelDirectory,
        ranges: Sequence[range],
        prompt: int,
        placing: Placing | None = None,
    ) -> None:
        self.blocks = [
            LayerBlock(
                directory,
                layers,
                first=layers.start == 0,
                last=layers.stop == directory.layers,
                placing=placing,
            )
            for layers in ranges
        ]
        self.caches = [block.new_cache(128) for block in self.blocks]
        self.runs = [
            StageRun(at + 1, Open(RUN, prompt, 128, Sampling()), last=at + 1 == len(ranges))
            for at in range(len(ranges))
        ]
        self.number = 0

    def feed(
        self,
        ids: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
    ) -> torch.Tensor:
        """Logits of a segment's rows."""
        segment = Segment(
            RUN, self.number, 1, tuple(ids), tuple(parents), tuple(positions), tuple(tokens)
        )
        self.number += 1
        rows = None
        for block, cache, run in zip(self.blocks, self.caches, self.runs, strict=True):
            kept = run.live_part(segment)
            segment = rows_of(segment, kept)
            hidden = block.run(run.begin_pass(segment, kept), rows, cache)
            rows = to_array(hidden)
        return self.blocks[-1].logits(hidden)

    def prune(
        self, offset: int, accepted: Sequence[int], root: int, retained: Sequence[int]
    ) -> None:
        """Tell every stage what was accepted and what is kept."""
        for run in self.runs:
            run.prune(Prune(RUN, offset, tuple(accepted), root, tuple(retained)))
