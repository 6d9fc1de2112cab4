"""A small language model as drafter: a whole beam per pass, its KV rows kept across steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.model.block import LayerBlock
from flowspec.model.directory import ModelDirectory
from flowspec.model.placing import Placing
from flowspec.model.sampling import perturbed_rows, top_logprobs
from flowspec.model.trial import check_family
from flowspec.model.two_level import RowCache


class ModelDrafter:
    """Proposes the most likely continuations; a child's value is its log-probability (T = 1).

    Probabilities are raw, whatever the job's temperature (docs/algorithms.md#draft-sources). A
    coupled draft ranks by the job's temperature and noise instead.
    """

    wants_hidden = False

    def __init__(self, block: LayerBlock) -> None:
        self._block = block
        self._runs: dict[RunKey, tuple[RowCache, Sampling]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = (self._block.new_cache(capacity), sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    @torch.inference_mode()
    def run(self, work: Draft) -> DraftDone:
        part = work.part
        cache, sampling = self._runs[part.run]
        hidden = self._block.run(part, None, cache)
        if not part.answers:
            return DraftDone((), ())
        return propose(self._block.logits(hidden[list(part.answers)]), work, sampling)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("a language model drafts from tokens alone")


def propose(logits: torch.Tensor, work: Draft, sampling: Sampling) -> DraftDone:
    """The best ``work.width`` tokens per answered row; ``logits`` is ``[answers, vocabulary]``."""
    width = min(work.width, logits.shape[-1])
    if work.coupled:
        indices = [work.part.positions[row] + 1 for row in work.part.answers]
        ranked = perturbed_rows(logits, sampling, indices, width)
    else:
        ranked = top_logprobs(logits, width)
    return DraftDone(tuple(tokens for tokens, _ in ranked), tuple(values for _, values in ranked))


def load_drafter(directory: ModelDirectory, placing: Placing | None = None) -> ModelDrafter:
    """The whole model in ``directory`` as a drafter; ModelError as from ``load_stage``."""
    check_family(directory)
    whole = range(directory.layers)
    return ModelDrafter(LayerBlock(directory, whole, first=True, last=True, placing=placing))
