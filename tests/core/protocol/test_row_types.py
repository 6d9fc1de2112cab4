"""bfloat16 outside torch."""

from __future__ import annotations

import numpy as np

from flowspec.core.protocol.row_types import BFLOAT16, to_float32


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    exact = np.array([0.0, -1.5, 2.0**100, -(2.0**-100), np.inf], dtype=np.float32)
    rows = (exact.view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
    assert (to_float32(rows) == exact).all()


def test_a_float32_copy_shares_no_memory() -> None:
    rows = np.ones((2, 3), dtype=np.float32)
    copy = to_float32(rows)
    copy[0, 0] = 5
    assert rows[0, 0] == 1
