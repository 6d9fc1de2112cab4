"""The rows of several jobs in one pass: linear layers over all of them, attention by job.

A pass reads every weight once, whatever the number of its rows. So the rows of several jobs go
through norms, products and activations together, one job's behind the other's; only the attention,
and the storage of keys and values, is by job, over that job's rows in the shapes of a pass of its
own. A row's bits are then those of such a pass wherever the products' rows are independent
(``linear.rows_are_independent``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.model.rows.kv import CACHE
from flowspec.model.rows.paged import RowCache

#: A job's mask as attention takes it, or one by type of layer.
Masks = torch.Tensor | dict[str, torch.Tensor]

#: Rows of the two jobs with which a family's layers are tried, and how far a row may be off, of the
#: largest value: other code differs by far more, lower precisions by less.
_TESTED = (5, 3)
_TOLERANCE = 0.05
_SEED = 9


class JobAttention(NamedTuple):
    """What one job of a pass attends with, and to, in one layer.

    ``rows``: of all rows. ``keys``, ``values``: all that it attends to with a mask, ``[1, key
    heads, slots, head_dim]``. ``bias``: its mask, in four dimensions.
    """

    rows: slice
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor


class RaggedLayer(CacheLayerMixin):
    """One layer's rows of several jobs; the library appends to it what a pass computes."""

    is_sliding = False

    def __init__(self, layers: Sequence[Any], spans: Sequence[slice]) -> None:
        super().__init__()
        self._layers = layers
        self._spans = spans
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the storage is the jobs' own."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each job's new rows to its own; return the new rows, which no job attends to."""
        self._kept = [
            layer.update(key_states[:, :, rows], value_states[:, :, rows])
            for layer, rows in zip(self._layers, self._spans, strict=True)
        ]
        return key_states, value_states

    def by_job(self, biases: torch.Tensor, shared: int) -> Iterator[JobAttention]:
        """Every job's. ``biases``: as ``joined``'s; ``shared``: mask rows of each row."""
        flat = biases.flatten()
        begin = 0
        for rows, (keys, values) in zip(self._spans, self._kept, strict=True):
            height = shared * (rows.stop - rows.start)
            end = begin + height * keys.shape[2]
            yield JobAttention(rows, keys, values, flat[begin:end].view(1, 1, height, -1))
            begin = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """The rows of several jobs for one pass over ``counts`` new rows of each.

    ``caches``: those of the jobs, after the moves of the pass.
    """

    def __init__(self, caches: Sequence[RowCache], counts: Sequence[int]) -> None:
        self.caches = caches
        self.spans = spans_of(counts)
        by_layer = zip(*(cache.layers for cache in caches), strict=True)
        super().__init__(layers=[RaggedLayer(layers, self.spans) for layers in by_layer])

    def by_job(self, layer: int, shared: int, biases: torch.Tensor) -> Iterator[JobAttention]:
        """Every job's in ``layer``; the rest as for ``RaggedLayer.by_job``."""
        known: Any = self.layers[layer]
        found: Iterator[JobAttention] = known.by_job(biases, shared)
        return found


def spans_of(counts: Sequence[int]) -> list[slice]:
    """Where each of several jobs with ``counts`` rows has them among all."""
    ends = list(accumulate(counts))
    return [slice(*pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]


def hands_through(block: Any) -> bool:
    """Whether the library's layers in ``block``, a ``LayerBlock``, let several jobs share a pass.

    They do if they hand the caches and masks through to the attention as they are: random rows of
    two jobs are then what they are alone.
    """
    source = torch.Generator().manual_seed(_SEED)
    parts = []
    for job, count in enumerate(_TESTED):
        ids = tuple(range(count))
        parents = tuple(node - 1 for node in ids)
        parts.append(Part(RunKey(f"test-{job}", 1), 0, ids, parents, ids, (), ids, count))
    width = block.config.hidden_size
    rows = [torch.randn((count, width), generator=source).numpy() for count in _TESTED]
    caches = [block.new_cache(count) for count in _TESTED]
    try:
        placements = [cache.begin_pass(part) for cache, part in zip(caches, parts, strict=True)]
        together = block.run_together(parts, rows, caches, placements)
    except Exception:  # noqa: BLE001 - whatever code of another family raises, it is not usable
        return False
    alone = [
        block.run(part, own, block.new_cache(len(own)))
        for part, own in zip(parts, rows, strict=True)
    ]
    return all(
        bool((one - other).abs().max() <= _TOLERANCE * one.abs().max())
        for one, other in zip(alone, together, strict=True)
    )


def for_layers(
    caches: Sequence[RowCache], counts: Sequence[int], masks: Sequence[Masks]
) -> dict[str, Any]:
    """What the library's layers are given for a pass over ``counts`` new rows of each job.

    A single job's cache and mask go in as they are, so that families run whose layers do not hand
    ``ragged`` through to the attention.
    """
    if len(caches) == 1:
        return {CACHE: caches[0], "attention_mask": masks[0]}
    ragged = RaggedCache(caches, counts)
    return {CACHE: ragged, "attention_mask": joined(masks), "ragged": ragged}


def joined(masks: Sequence[Any]) -> Any:
    """The jobs' masks one after the other, ``[1, 1, 1, values]``, for ``RaggedLayer.by_job``.

    In four dimensions the library hands a mask through to the attention as it is.
    """
    if isinstance(masks[0], dict):
        return {name: joined([mask[name] for mask in masks]) for name in masks[0]}
    return torch.cat([mask.flatten() for mask in masks]).view(1, 1, 1, -1)
