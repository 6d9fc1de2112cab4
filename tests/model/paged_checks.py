"""What has to hold of a pool and of who has its blocks, found without the pool's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flowspec.core.run.limits import BLOCK_ROWS
from flowspec.model.rows.paged import PagedCache, PagedStore, SharedRows


def check_pool(
    store: PagedStore, caches: Iterable[PagedCache], kept: Iterable[SharedRows] = ()
) -> None:
    """Every block is free or someone's, counted once for each; only context is shared."""
    caches = list(caches)
    tables = [cache.table for cache in caches]
    shares = [rows.blocks for rows in kept]
    counts = Counter(block for blocks in (*tables, *shares) for block in blocks)
    assert store.pool._references == [counts[block] for block in range(len(store.pool))]
    assert store.pool.free == len(store.pool) - len(counts)
    assert store.pool.shared == sum(count > 1 for count in counts.values())
    for blocks in (*tables, *shares):
        assert len(set(blocks)) == len(blocks), "a text has a block once"
    for cache in caches:
        writable = cache.table[cache.held // BLOCK_ROWS :]
        if len(cache.table) * BLOCK_ROWS > cache.held:
            fresh = [block for block in writable[1:] if counts[block] > 1]
            assert not fresh, "rows behind the held ones are in blocks of their own"
