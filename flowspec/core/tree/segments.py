"""Cutting an ordered set of nodes into pipeline segments."""

from __future__ import annotations

from collections.abc import Sequence


def cut(ids: Sequence[int], parts: int, limit: int) -> list[list[int]]:
    """Cut ``ids`` into ``parts`` consecutive, near-equal segments, smaller ones first.

    The remainder of the division does not count against ``limit``, so the larger ones may have one
    row more: the root comes on top of the tree that ``limit`` is chosen for. If even the smaller
    ones would exceed ``limit``, there are more segments, of ``limit`` rows and the last of fewer.
    Source: FlowSpec section 3.2 and its code; docs/algorithms.md#segments.
    """
    parts = max(1, min(parts, len(ids)))
    size, longer = divmod(len(ids), parts)
    if size > limit:
        return chunks(ids, limit)
    sizes = [size] * (parts - longer) + [size + 1] * longer
    return _split(ids, sizes)


def chunks(ids: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive segments of ``limit`` rows, the last one shorter."""
    return [list(ids[at : at + limit]) for at in range(0, len(ids), limit)]


def prefill_chunks(end: int, begin: int = 0, single: int = 64, size: int = 60) -> list[range]:
    """Cut prompt positions into near-equal chunks of at most ``size``, smaller ones first.

    From ``begin`` on; at most ``single`` tokens are one chunk. Source: FlowSpec's code
    (docs/algorithms.md#prefill).
    """
    length = end - begin
    if length <= single:
        return [range(begin, end)]
    parts = -(-length // size)
    base, longer = divmod(length, parts)
    sizes = [base] * (parts - longer) + [base + 1] * longer
    starts = [begin + sum(sizes[:at]) for at in range(parts)]
    return [range(start, start + count) for start, count in zip(starts, sizes, strict=True)]


def _split(ids: Sequence[int], sizes: list[int]) -> list[list[int]]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [list(ids[end - size : end]) for end, size in zip(ends, sizes, strict=True) if size]
