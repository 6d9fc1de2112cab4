"""KV rows of one job at one stage in blocks of a pool: the paged form of ``kv``.

The layout is that of ``rows``: context rows in order, and the live tree rows behind them. Slot s of
it lies in block ``table[s // BLOCK_ROWS]``. The table grows with a pass and shrinks with the prunes
before it. Rows that are kept, and jobs that begin with them, refer to the same blocks.

The pool's tensor has the shape of a ``TreeCache`` for all jobs together, so the rows of
neighbouring blocks are one range of it. A pass reads and writes rows by such ranges (``Slots``): a
job whose blocks are neighbours costs what it does in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from flowspec.core.protocol.work import Part
from flowspec.core.run.limits import BLOCK_ROWS
from flowspec.errors import StateError
from flowspec.model.rows.block_pool import BlockPool
from flowspec.model.rows.kv import Slots, TreeCache
from flowspec.model.rows.placement import Moves, Placement, row_store


class PagedStore:
    """A stage's pool with the rows in it, ``[layers, 2, heads, blocks x rows, head_dim]``."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.pool = BlockPool(rows.shape[3] // BLOCK_ROWS)

    @classmethod
    def allocate(
        cls,
        layers: int,
        heads: int,
        blocks: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> PagedStore:
        """Allocate ``blocks`` blocks, on the CPU if no ``device`` is given.

        There, memory pages are touched only as rows are written.
        """
        shape = (layers, 2, heads, blocks * BLOCK_ROWS, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device))

    def new_cache(self) -> PagedCache:
        """The rows of a job that has none yet."""
        return PagedCache(self)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.rows.nbytes // len(self.pool)

    def facts(self) -> dict[str, object]:
        """For ``status``: how many blocks there are, are free, and are shared."""
        pool = self.pool
        return {
            "blocks": len(pool),
            "free": pool.free,
            "shared": pool.shared,
            "block_rows": BLOCK_ROWS,
        }


class SharedRows:
    """The first ``count`` context rows of a job, in blocks that it may go on to share."""

    def __init__(self, store: PagedStore, blocks: Sequence[int], count: int) -> None:
        self.blocks = tuple(blocks)
        self.count = count
        self._store = store
        for block in self.blocks:
            store.pool.share(block)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, which others may share."""
        return len(self.blocks) * self._store.block_bytes

    def free(self) -> None:
        """Give up the blocks."""
        for block in self.blocks:
            self._store.pool.drop(block)
        self.blocks = ()


class PagedLayer(CacheLayerMixin):
    """One layer's rows of a ``PagedCache``; the library appends to it what a pass computes."""

    is_sliding = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated up front."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new rows to the held ones; return all rows, without a copy if possible."""
        slots = self._cache.layer_slots(self._layer, key_states.shape[2])
        slots.write(key_states[0], value_states[0])
        rows = slots.kept[0] if len(slots.kept) == 1 else torch.cat(slots.kept, dim=2)
        keys, values = rows.unsqueeze(1)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.held + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.held

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """All layers' rows of one job; ``held`` of them before the rows of the present pass."""

    def __init__(self, store: PagedStore) -> None:
        self.held = 0
        self._store = store
        self._rows = row_store()
        self._table: list[int] = []
        layers = store.rows.shape[0]
        super().__init__(layers=[PagedLayer(self, layer) for layer in range(layers)])

    @property
    def table(self) -> tuple[int, ...]:
        """The blocks of its rows, in their order."""
        return tuple(self._table)

    def begin_pass(self, part: Part) -> Placement:
        """Apply the part's prune and make room for its rows; return their placement.

        StateError if the pool has too few blocks; the job cannot go on then.
        """
        placement = self._rows.place(part)
        self.carry_out(placement.moves, placement.held, len(part.ids))
        return placement

    def carry_out(self, moves: Moves | None, held: int, new: int) -> None:
        """Make ``moves``, and room for ``new`` rows from slot ``held`` on."""
        if moves is not None:
            end = moves.start + len(moves.sources)
            self._own(moves.start, end)
            self._move(range(moves.start, end), moves.sources)
        self._cut(held)
        self._own(held, held + new)
        # All or nothing, so that a job for which there is no room takes none from others.
        missing = _blocks(held + new) - len(self._table)
        self._store.pool.require(missing)
        for _ in range(missing):
            self._table.append(self._store.pool.take(self._table[-1] if self._table else None))
        self.held = held

    def kept(self, rows: int) -> SharedRows:
        """The first ``rows`` rows, which have to be context, in the blocks where they are."""
        return SharedRows(self._store, self._table[: _blocks(rows)], rows)

    def resume(self, rows: SharedRows, held: int) -> None:
        """Begin, as a new cache, with the first ``held`` of ``rows``."""
        if self._table:
            raise StateError("a job that has rows cannot begin with kept ones")
        self._table = [*rows.blocks[: _blocks(held)]]
        for block in self._table:
            self._store.pool.share(block)
        self._rows = row_store(held)
        self.held = held

    def free(self) -> None:
        """Give up all blocks; the job has ended."""
        self._cut(0)

    def slots(self, new: int) -> Slots:
        """The rows of all layers in a pass over ``new`` rows, for who appends them himself."""
        return self._slots(self._store.rows, new)

    def layer_slots(self, layer: int, new: int) -> Slots:
        """``slots`` of ``layer`` alone."""
        return self._slots(self._store.rows[layer], new)

    def _slots(self, rows: torch.Tensor, new: int) -> Slots:
        ranges = (self._ranges(self.held, self.held + new), self._ranges(0, self.held + new))
        return Slots(*(tuple(rows[..., slice(*pair), :] for pair in found) for found in ranges))

    def _ranges(self, first: int, end: int) -> list[tuple[int, int]]:
        """Where slots ``first`` to ``end`` are among the pool's rows: ranges, in their order."""
        found: list[tuple[int, int]] = []
        while first < end:
            at = first // BLOCK_ROWS
            begin = self._row(first)
            last = self._table[at]
            while (at + 1) * BLOCK_ROWS < end and self._table[at + 1] == last + 1:
                at += 1
                last += 1
            stop = min(end, (at + 1) * BLOCK_ROWS)
            found.append((begin, begin + stop - first))
            first = stop
        return found

    def _row(self, slot: int) -> int:
        """Where ``slot`` is among the pool's rows."""
        block, inside = divmod(slot, BLOCK_ROWS)
        return self._table[block] * BLOCK_ROWS + inside

    def _move(self, slots: Sequence[int], sources: Sequence[int]) -> None:
        rows = self._store.rows
        places = [torch.tensor([self._row(slot) for slot in them]) for them in (slots, sources)]
        to, of = (place.to(rows.device) for place in places)
        rows.index_copy_(3, to, rows.index_select(3, of))

    def _own(self, first: int, end: int) -> None:
        """Have a copy of every shared block that holds one of slots ``first`` to ``end``."""
        pool = self._store.pool
        for at in range(first // BLOCK_ROWS, min(_blocks(end), len(self._table))):
            shared = self._table[at]
            if pool.is_shared(shared):
                own = pool.take(self._table[at - 1] if at else None)
                self._copy(shared, own)
                pool.drop(shared)
                self._table[at] = own

    def _copy(self, source: int, to: int) -> None:
        rows = self._store.rows
        blocks = [slice(at * BLOCK_ROWS, (at + 1) * BLOCK_ROWS) for at in (to, source)]
        rows[..., blocks[0], :] = rows[..., blocks[1], :]

    def _cut(self, rows: int) -> None:
        """Give up the blocks behind the first ``rows`` slots."""
        gone = self._table[_blocks(rows) :]
        del self._table[_blocks(rows) :]
        for block in gone:
            self._store.pool.drop(block)


#: A job's rows in one store or the other.
RowCache = TreeCache | PagedCache


def _blocks(rows: int) -> int:
    """Blocks that ``rows`` rows take."""
    return -(-rows // BLOCK_ROWS)
