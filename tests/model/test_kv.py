"""Cache rows move in place as their planned places do."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.model.rows.kv import TreeCache
from flowspec.model.rows.placement import Moves
from tests.marks import examples


@given(st.data())
@settings(deadline=None, max_examples=examples(100))
def test_moves_equal_a_gather(data: st.DataObject) -> None:
    capacity = 40
    start = data.draw(st.integers(0, 20))
    sources = sorted(data.draw(st.sets(st.integers(start, capacity - 1), max_size=15)))
    cache = TreeCache.allocate(2, 3, capacity, 4, torch.float32)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    rows = [*range(start), *sources]
    expected = cache.storage[..., rows, :].clone()
    cache.carry_out(Moves(start, tuple(sources)) if sources else None, len(rows))
    assert torch.equal(cache.storage[..., : len(rows), :], expected)
    assert [layer.get_seq_length() for layer in cache.layers] == [len(rows)] * 2


def test_update_appends_in_place_and_returns_views() -> None:
    cache = TreeCache.allocate(1, 2, 8, 4, torch.float32)
    cache.carry_out(None, 0)
    first = torch.randn(1, 2, 3, 4)
    cache.layers[0].update(first, first)
    cache.carry_out(None, 2)  # the third row was pruned
    second = torch.randn(1, 2, 2, 4)
    keys, values = cache.layers[0].update(second, second)
    assert torch.equal(keys, torch.cat([first[:, :, :2], second], dim=2))
    assert values.data_ptr() == cache.layers[0].values.data_ptr()
