"""A small language model as drafter: beam in one pass, its own KV rows kept across steps."""

from __future__ import annotations

import torch

from flowspec.core.machine import Draft, DraftDone
from flowspec.core.messages import Returns
from flowspec.core.sampling import Sampling
from flowspec.model.directory import ModelDirectory
from flowspec.model.kv import TreeCache
from flowspec.model.stage import LayerBlock


class ModelDrafter:
    """Proposes the most likely continuations; a child's value is its log-probability (T = 1).

    Raw probabilities, whatever the job's temperature: ``algorithms.md`` 9.14.
    """

    def __init__(self, block: LayerBlock) -> None:
        self._block = block
        self._jobs: dict[str, TreeCache] = {}

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._jobs[job] = self._block.new_cache(capacity)

    def release(self, job: str) -> None:
        self._jobs.pop(job, None)

    @torch.inference_mode()
    def run(self, work: Draft) -> DraftDone:
        part = work.part
        hidden = self._block.run(part, None, self._jobs[part.job])
        if not part.answers:
            return DraftDone((), ())
        logprobs = torch.log_softmax(self._block.logits(hidden[part.answers[0] :]).float(), dim=-1)
        top = torch.topk(logprobs, min(work.width, logprobs.shape[-1]))
        values = top.values.clamp(max=0.0)
        return DraftDone(tuple(map(tuple, top.indices.tolist())), tuple(map(tuple, values.tolist())))


def load_drafter(directory: ModelDirectory) -> ModelDrafter:
    """The whole model in ``directory`` as a drafter."""
    return ModelDrafter(LayerBlock(directory, range(directory.layers), first=True, last=True))
