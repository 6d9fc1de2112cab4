"""Element types of rows outside torch: numpy has no bfloat16, so it is a tagged 16-bit view."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

#: bfloat16 values as one-field records of their bits; msgpack-numpy writes and reads the tag.
BFLOAT16 = np.dtype([("bfloat16", "<u2")])

#: Element types of a target's rows, by the names of precisions.
ROW_TYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": BFLOAT16,
    "float16": np.dtype("<f2"),
}


def to_float32(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A float32 copy of ``rows``, exact for every row type."""
    if rows.dtype == BFLOAT16:
        return (rows["bfloat16"].astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=True)
