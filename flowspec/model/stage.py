"""A verify stage's executor: one block of layers and the KV rows of its jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, StateError
from flowspec.model.arrays import to_array
from flowspec.model.base import RowArray
from flowspec.model.block import LayerBlock
from flowspec.model.directory import ModelDirectory
from flowspec.model.placing import Placing
from flowspec.model.rows import Placement
from flowspec.model.sampling import choose_rows, top_logprobs
from flowspec.model.tap_shares import TapShares
from flowspec.model.taps import Taps
from flowspec.model.trial import check_family
from flowspec.model.two_level import PLAIN, RowCache


class ModelStage:
    """A verify stage's executor: one block and the KV rows of its jobs.

    ``taps``: the block's share of a drafter's sum. Runs that return hidden rows then carry the sum,
    and the last stage returns it in their place.
    """

    def __init__(self, block: LayerBlock, taps: TapShares | None = None) -> None:
        self._block = block
        self._taps = taps
        self._runs: dict[RunKey, tuple[RowCache, Sampling, Returns]] = {}

    @property
    def block(self) -> LayerBlock:
        """The block that this stage runs."""
        return self._block

    def facts(self) -> dict[str, object]:
        """See ``LayerBlock.facts``."""
        return self._block.facts()

    @property
    def model_seconds(self) -> float:
        """CPU seconds spent in the model itself so far; the rest of the passes is overhead."""
        return self._block.seconds

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = (self._block.new_cache(capacity), sampling, returns)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._run(work, inputs)
        # The failed pass is over and holds nothing; its blocks would keep the next job from memory.
        torch.cuda.empty_cache()
        raise StateError(
            f"the device {self._block.device} is out of memory; "
            "run fewer jobs, shorter contexts or smaller segments, or give it fewer layers"
        )

    def _run(
        self, work: Pass, inputs: Sequence[RowArray | None]
    ) -> tuple[PassDone, list[RowArray]]:
        if len(work.parts) == 1:
            part = work.parts[0]
            hidden, output = self._alone(part, inputs[0])
            return PassDone(self._choices([part], [hidden])), [output]
        return self._together(work.parts, inputs)

    def _alone(self, part: Part, rows: RowArray | None) -> tuple[torch.Tensor, RowArray]:
        cache, _, returns = self._runs[part.run]
        if self._taps is not None and returns.hidden:
            return self._taps.run(part, rows, cache)
        hidden = self._block.run(part, rows, cache)
        return hidden, to_array(hidden)

    def _together(
        self, parts: Sequence[Part], inputs: Sequence[RowArray | None]
    ) -> tuple[PassDone, list[RowArray]]:
        """Several jobs' rows; those with a drafter's sums beside them go through by themselves."""
        hidden: dict[int, torch.Tensor] = {}
        outputs: list[RowArray] = [np.empty(0)] * len(parts)
        choices: list[Choice | WorkFailed] = [Choice()] * len(parts)
        placements: dict[int, Placement] = {}
        for at, part in enumerate(parts):
            cache, _, returns = self._runs[part.run]
            try:
                if self._taps is not None and returns.hidden:
                    hidden[at], outputs[at] = self._taps.run(part, inputs[at], cache)
                else:
                    placements[at] = cache.begin_pass(part)
            except FlowSpecError as error:
                choices[at] = WorkFailed(str(error))
        if placements:
            found = self._block.run_together(
                [parts[at] for at in placements],
                [inputs[at] for at in placements],
                [self._runs[parts[at].run][0] for at in placements],
                list(placements.values()),
            )
            for at, rows in zip(placements, found, strict=True):
                hidden[at] = rows
                outputs[at] = to_array(rows)
        chosen = self._choices([parts[at] for at in hidden], list(hidden.values()))
        for at, choice in zip(hidden, chosen, strict=True):
            choices[at] = choice
        return PassDone(tuple(choices)), outputs

    def _choices(self, parts: Sequence[Part], hidden: Sequence[torch.Tensor]) -> tuple[Choice, ...]:
        """Each part's choices, from the head's product over all answered rows."""
        asked = [
            rows[list(part.answers)]
            for part, rows in zip(parts, hidden, strict=True)
            if part.answers
        ]
        if not asked:
            return (Choice(),) * len(parts)
        found = self._block.logits(torch.cat(asked))
        logits = iter(torch.split(found, [len(rows) for rows in asked]))
        return tuple(
            self._choose(part, next(logits)) if part.answers else Choice() for part in parts
        )

    def _choose(self, part: Part, logits: torch.Tensor) -> Choice:
        _, sampling, returns = self._runs[part.run]
        indices = [part.positions[row] + 1 for row in part.answers]
        tokens = choose_rows(logits, sampling, indices)
        if not returns.top:
            return Choice(tokens)
        best = top_logprobs(logits, returns.top)
        return Choice(tokens, tuple(tuple(zip(*pair, strict=True)) for pair in best))


def load_stage(
    directory: ModelDirectory,
    layers: range,
    attention: str = PLAIN,
    placing: Placing | None = None,
    taps: Taps | None = None,
    drafter: ModelDirectory | None = None,
) -> ModelStage:
    """The executor of the verify stage with ``layers``; the rest as in ``LayerBlock``.

    ``taps`` and ``drafter``: what the pipeline's drafter reads inside the target, as in
    ``TapShares``.
    ModelError if the model's family is not tested and stages of it are not what the whole is.
    """
    check_family(directory)
    first = layers.start == 0
    last = layers.stop == directory.layers
    block = LayerBlock(
        directory, layers, first=first, last=last, attention=attention, placing=placing
    )
    shares = TapShares(block, layers, taps, drafter) if taps is not None else None
    return ModelStage(block, shares)
