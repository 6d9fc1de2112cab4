"""KV rows of one job at one stage: preallocated, appended in place, compacted in place.

One tensor ``[layers, 2, 1, heads, capacity, head_dim]`` holds keys and values of all layers, so
that one copy moves a row in all of them. The library's decoder layers use views of it as their
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin

from flowspec.core.protocol.work import Part
from flowspec.model.rows.placement import Moves, Placement, row_store

#: The library's name for what its layers are given as their cache.
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class Slots(NamedTuple):
    """Rows in a pass, keys before values, as they lie in one or several pieces.

    ``new``: where those of the pass go. ``kept``: all up to them. A piece is ``[layers, 2, heads,
    rows, head_dim]``, or of one layer without the first dimension.
    """

    new: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]

    @property
    def added(self) -> int:
        """Rows of the pass."""
        return sum(piece.shape[-2] for piece in self.new)

    def by_layer(self) -> list[Slots]:
        """Those of each layer."""
        new, kept = (zip(*(piece.unbind() for piece in pieces), strict=True) for pieces in self)
        return [Slots(*pair) for pair in zip(new, kept, strict=True)]

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep one layer's ``keys`` and ``values`` of the pass, ``[heads, rows, head_dim]``."""
        begin = 0
        for piece in self.new:
            end = begin + piece.shape[-2]
            piece[0].copy_(keys[:, begin:end])
            piece[1].copy_(values[:, begin:end])
            begin = end

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """All rows of one layer in ``dtype``, ``[2, heads, rows, head_dim]``."""
        first = self.kept[0]
        if len(self.kept) == 1:
            return first.to(dtype)
        ends = [*accumulate(piece.shape[-2] for piece in self.kept)]
        rows = first.new_empty((*first.shape[:2], ends[-1], first.shape[-1]), dtype=dtype)
        for piece, end in zip(self.kept, ends, strict=True):
            rows[:, :, end - piece.shape[-2] : end].copy_(piece)
        return rows


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Copies of a job's first context rows, ``[layers, 2, 1, heads, rows, head_dim]``."""

    rows: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.rows.shape[-2])

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def free(self) -> None:
        """Do nothing: the memory goes with the tensor."""


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
        """Do nothing: the storage is allocated up front."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new rows to the held ones; return views of all rows."""
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
        self._flat = storage[:, :, 0]
        self._rows = row_store()
        self._held = 0
        super().__init__(layers=[TreeCacheLayer(layer[0], layer[1]) for layer in storage])

    @classmethod
    def allocate(
        cls,
        layers: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> TreeCache:
        """Allocate ``capacity`` rows, on the CPU if no ``device`` is given.

        There, memory pages are touched only as rows are written.
        """
        shape = (layers, 2, 1, heads, capacity, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device))

    def begin_pass(self, part: Part) -> Placement:
        """Apply the part's prune and make room for its rows; return their placement."""
        placement = self._rows.place(part)
        self.carry_out(placement.moves, placement.held)
        return placement

    def kept(self, rows: int) -> CopiedRows:
        """A copy of the first ``rows`` rows."""
        return CopiedRows(self.storage[..., :rows, :].clone())

    def resume(self, rows: CopiedRows, held: int) -> None:
        """Begin with the first ``held`` context rows of what ``kept`` has returned."""
        self.storage[..., :held, :] = rows.rows[..., :held, :]
        self._rows = row_store(held)
        self.carry_out(None, held)

    def slots(self, new: int) -> Slots:
        """The rows of all layers in a pass over ``new`` rows, for who appends them himself."""
        kept = self._flat.narrow(3, 0, self._held + new)
        return Slots((self._flat.narrow(3, self._held, new),), (kept,))

    def carry_out(self, moves: Moves | None, held: int) -> None:
        """Make ``moves``; the next rows go to slot ``held``."""
        if moves is not None:
            for start, source, count in copies(moves):
                self._copy(start, source, count)
        self._held = held
        for layer in self.layers:
            layer.length = held

    def _copy(self, start: int, source: int, count: int) -> None:
        rows = self.storage[..., source : source + count, :]
        if source < start + count:
            rows = rows.clone()
        self.storage[..., start : start + count, :] = rows


def copies(moves: Moves) -> Iterator[tuple[int, int, int]]:
    """``moves`` as copies of consecutive rows: (destination, source, count)."""
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
