from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.segments import chunks, cut, prefill_chunks


def test_the_papers_cut_with_its_limit_enforced() -> None:
    """L = 80 and the root in five segments of at most 16 rows: one row waits.

    Source: docs/algorithms.md#segments.
    """
    assert [len(part) for part in cut(range(81), 5, 16)] == [16, 16, 16, 16, 16, 1]
    assert [len(part) for part in cut(range(81), 5, 17)] == [16, 16, 16, 16, 17]


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 80))
def test_cut_loses_nothing_and_keeps_the_limit(count: int, parts: int, limit: int) -> None:
    segments = cut(range(count), parts, limit)
    assert [node for segment in segments for node in segment] == list(range(count))
    assert all(0 < len(segment) <= limit for segment in segments)
    sizes = [len(segment) for segment in segments]
    if len(segments) <= parts:
        assert sizes == sorted(sizes)
        assert max(sizes) - min(sizes) <= 1


def test_chunks() -> None:
    assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


@given(st.integers(1, 2000))
def test_prefill_chunks_cover_the_prompt(length: int) -> None:
    parts = prefill_chunks(length)
    assert [position for part in parts for position in part] == list(range(length))
    if length > 64:
        assert len(parts) == -(-length // 60)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes)
    assert max(sizes) <= 64
