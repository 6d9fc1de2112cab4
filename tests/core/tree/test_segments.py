from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.tree.segments import chunks, cut, prefill_chunks


def test_the_papers_tree_and_its_root_are_as_many_segments_as_the_papers() -> None:
    """L = 80 and the root in five segments: one exceeds L_max = 16 by the root.

    Source: docs/algorithms.md#segments.
    """
    assert [len(part) for part in cut(range(81), 5, 16)] == [16, 16, 16, 16, 17]
    assert [len(part) for part in cut(range(81), 5, 15)] == [15, 15, 15, 15, 15, 6]


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 80))
def test_cut_loses_nothing_and_divides_evenly(count: int, parts: int, limit: int) -> None:
    segments = cut(range(count), parts, limit)
    assert [node for segment in segments for node in segment] == list(range(count))
    sizes = [len(segment) for segment in segments]
    assert len(segments) == (
        min(parts, count) if count // min(parts, count) <= limit else -(-count // limit)
    )
    if len(segments) == min(parts, count):
        assert sizes == sorted(sizes)
        assert sizes[-1] - sizes[0] <= 1
    else:
        assert sizes[:-1] == [limit] * (len(sizes) - 1)


@given(st.integers(2, 12), st.integers(1, 40))
def test_only_the_remainder_may_exceed_the_limit(parts: int, limit: int) -> None:
    """Whatever fits N + 1 segments of L_max without the root also fits with it."""
    segments = cut(range(parts * limit + 1), parts, limit)
    assert [len(segment) for segment in segments] == [*[limit] * (parts - 1), limit + 1]


@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 80))
def test_no_segment_is_empty_or_more_than_one_row_too_long(
    count: int, parts: int, limit: int
) -> None:
    assert all(0 < len(segment) <= limit + 1 for segment in cut(range(count), parts, limit))


def test_chunks() -> None:
    assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


@given(st.integers(1, 2000))
def test_prefill_chunks_cover_the_prompt(length: int) -> None:
    begun = prefill_chunks(length + 9, begin=9)
    assert [range(part.start - 9, part.stop - 9) for part in begun] == prefill_chunks(length)
    parts = prefill_chunks(length)
    assert [position for part in parts for position in part] == list(range(length))
    if length > 64:
        assert len(parts) == -(-length // 60)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes)
    assert max(sizes) <= 64
