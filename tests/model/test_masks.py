from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowspec.model.rows.masks import full_mask, tree_mask


@given(st.data())
def test_a_row_sees_itself_and_its_ancestors(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 25))
    parents = [data.draw(st.integers(-1, at - 1)) for at in range(total)]
    new = data.draw(st.integers(1, total))
    mask = tree_mask(parents, new)
    for row in range(new):
        visible = set()
        at = total - new + row
        while at >= 0:
            visible.add(at)
            at = parents[at]
        assert set(np.flatnonzero(mask[row]).tolist()) == visible


@given(st.integers(1, 40), st.integers(0, 40))
def test_a_chain_is_causal(rows: int, context: int) -> None:
    mask = full_mask(context, range(-1, rows - 1), rows)
    assert (mask == np.tri(rows, context + rows, context, dtype=bool)).all()
