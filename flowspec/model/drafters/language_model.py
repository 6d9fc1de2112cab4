"""A small language model as drafter: a whole beam per pass, its KV rows kept across steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept, Part, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.layers.trial import check_family
from flowspec.model.rows.arrays import joined, split, taken
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.paged import RowCache
from flowspec.model.rows.placement import Placement
from flowspec.model.rows.several import each_of
from flowspec.model.sampling.choice import perturbed_rows
from flowspec.model.weights.directory import ModelDirectory


class _PlacedDraft(NamedTuple):
    """A draft with its rows, its job's KV rows, their places, and its sampling."""

    work: Draft
    part: Part
    cache: RowCache
    placement: Placement
    sampling: Sampling


class ModelDrafter:
    """Proposes the most likely continuations; a child's value is its log-probability (T = 1).

    Probabilities are raw, whatever the job's temperature (docs/algorithms.md#draft-sources). A
    coupled draft ranks by the job's temperature and noise instead.
    """

    wants_hidden = False

    def __init__(self, block: LayerBlock, vocabulary: int | None = None) -> None:
        """``vocabulary``: the target's, if it is not the model's own.

        Models of one tokenizer pad their vocabularies differently. Ids that only the drafter has
        are never proposed.
        """
        self._block = block
        own = int(block.config.vocab_size)
        self._shared = min(own, vocabulary or own)
        self._runs: dict[RunKey, tuple[RowCache, Sampling]] = {}
        self._kept: KeptRows[Any] = KeptRows()
        self.evict = self._kept.evict

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = (self._block.new_cache(capacity), sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below."""
        (wanted,) = caches
        self._kept.keep(run, self._runs[run][0], wanted)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        self._kept.resume(self._runs[run][0], source, rows)

    def run(self, work: Draft) -> DraftDone:
        (found,) = self._compute([self._place(work)])
        return found

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        block = self._block
        return each_of(works, self._place, self._compute, joins=block.joins, device=block.device)

    def _place(self, work: Draft) -> _PlacedDraft:
        part = work.part
        cache, sampling = self._runs[part.run]
        return _PlacedDraft(work, part, cache, cache.begin_pass(part), sampling)

    @torch.inference_mode()
    def _compute(self, placed: Sequence[_PlacedDraft]) -> list[DraftDone]:
        """The proposals of every draft, from one pass."""
        parts = [one.part for one in placed]
        caches = [one.cache for one in placed]
        placements = [one.placement for one in placed]
        hidden = self._block.run_together(parts, [None] * len(parts), caches, placements)
        asked = [taken(rows, part.answers) for rows, part in zip(hidden, parts, strict=True)]
        if not any(map(len, asked)):
            return [DraftDone((), ()) for _ in placed]
        logits = self._block.logits(joined(asked))[:, : self._shared]
        each = split(logits, [len(rows) for rows in asked])
        return [
            propose(own, one.work, one.sampling) if len(own) else DraftDone((), ())
            for own, one in zip(each, placed, strict=True)
        ]

    def facts(self) -> dict[str, object]:
        """What it runs on, as ``LayerBlock.place_facts``."""
        return self._block.place_facts()

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("a language model drafts from tokens alone")


def propose(logits: torch.Tensor, work: Draft, sampling: Sampling) -> DraftDone:
    """The best ``work.width`` tokens per answered row; ``logits`` is ``[answers, vocabulary]``."""
    indices = [work.part.positions[row] + 1 for row in work.part.answers]
    rows = ranked(logits, work, sampling, indices)
    return DraftDone(tuple(tokens for tokens, _ in rows), tuple(values for _, values in rows))


def ranked(
    logits: torch.Tensor, work: Draft, sampling: Sampling, indices: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and values of the best ``work.width`` of each row of ``logits``.

    ``indices``: the absolute index of the token that a row proposes, which its noise depends on.
    """
    width = min(work.width, logits.shape[-1])
    if work.coupled:
        return perturbed_rows(logits, sampling, indices, width)
    # Of a small vocabulary this takes a quarter of the time of ``top_logprobs``, whose order of
    # ties and sums in float64 a draft does not need.
    wide = logits.float()
    best = torch.topk(wide, width)
    values = (best.values - wide.logsumexp(1, keepdim=True)).clamp_(max=0)
    return [
        (tuple(tokens), tuple(row))
        for tokens, row in zip(best.indices.tolist(), values.tolist(), strict=True)
    ]


def load_drafter(
    directory: ModelDirectory, placing: Placing | None = None, vocabulary: int | None = None
) -> ModelDrafter:
    """The whole model in ``directory`` as a drafter; ModelError as from ``load_stage``."""
    check_family(directory)
    whole = range(directory.layers)
    block = LayerBlock(directory, whole, first=True, last=True, placing=placing)
    return ModelDrafter(block, vocabulary)
