"""KV rows of one job at one stage: preallocated, appended in place, compacted in place.

One tensor ``[layers, 2, 1, heads, capacity, head_dim]`` holds keys and values of all layers, so
that a prune moves rows of all of them at once. The library's decoder layers take the views as
their cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from flowspec.core.tree.slots import Moves


class TreeCacheLayer(CacheLayerMixin):
    """One layer's rows inside a ``TreeCache``; the owner sets ``length`` before each pass."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values  # [1, heads, capacity, head_dim]
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the new rows behind the held ones; views of all of them."""
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class TreeCache(Cache):
    """All layers' rows of one job."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage
        super().__init__(layers=[TreeCacheLayer(layer[0], layer[1]) for layer in storage])

    @classmethod
    def allocate(
        cls, layers: int, heads: int, capacity: int, head_dim: int, dtype: torch.dtype
    ) -> TreeCache:
        """Room for ``capacity`` rows; pages are touched only as rows are written."""
        return cls(torch.empty((layers, 2, 1, heads, capacity, head_dim), dtype=dtype))

    def begin_pass(self, held: int, moves: Moves | None) -> None:
        """Carry out ``moves`` and let the next rows go to slot ``held``."""
        if moves is not None:
            for start, source, count in runs(moves):
                self._copy(start, source, count)
        for layer in self.layers:
            layer.length = held

    def _copy(self, start: int, source: int, count: int) -> None:
        rows = self.storage[..., source : source + count, :]
        if source < start + count:
            rows = rows.clone()
        self.storage[..., start : start + count, :] = rows


def runs(moves: Moves) -> Iterator[tuple[int, int, int]]:
    """Consecutive sources as (destination, source, rows)."""
    start = moves.start
    first = -1
    count = 0
    for source in moves.sources:
        if count and source == first + count:
            count += 1
            continue
        if count:
            yield start, first, count
        start = start + count
        first = source
        count = 1
    if count:
        yield start, first, count
