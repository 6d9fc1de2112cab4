"""Rows of several parts in one tensor: as torch's own operations, whatever the number of parts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.rows.arrays import joined, split, taken

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(COUNTS)
def test_parts_are_joined_and_split_again(counts: list[int]) -> None:
    parts = [torch.randn(count, 3) for count in counts]
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(parts))
    assert all(map(torch.equal, split(whole, counts), parts))


@given(st.integers(1, 6), st.data())
def test_the_rows_at_any_places_are_taken(count: int, data: st.DataObject) -> None:
    rows = torch.randn(count, 3)
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=6))
    expected = rows.index_select(0, torch.tensor(places, dtype=torch.int64))
    for given_as in (places, tuple(places)):
        assert torch.equal(taken(rows, given_as), expected)


@given(st.integers(0, 6), st.integers(0, 6))
def test_rows_one_behind_another_are_no_copy(first: int, count: int) -> None:
    rows = torch.randn(12, 3)
    found = taken(rows, range(first, first + count))
    assert torch.equal(found, rows[first : first + count])
    assert not count or found.data_ptr() == rows[first].data_ptr()
