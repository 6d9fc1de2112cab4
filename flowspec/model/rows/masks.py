"""The attention mask of a pass, from parent links alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def tree_mask(parents: Sequence[int], new: int) -> npt.NDArray[np.bool_]:
    """Which tree rows the last ``new`` rows attend to, themselves included: ``[new, tree rows]``.

    ``parents``: as in ``rows.Placement``, offsets into the tree region, -1 for a context parent.
    Every row attends to the context, which is not part of the mask. A single row is masked like
    any other.
    """
    total = len(parents)
    first = total - new
    if not first and parents[:2] == (-1, 0) and tuple(parents) == tuple(range(-1, total - 1)):
        return np.tri(total, dtype=np.bool_)
    mask = np.zeros((new, total), dtype=np.bool_)
    for row in range(new):
        at = first + row
        mask[row, at] = True
        above = parents[at]
        while 0 <= above < first:
            mask[row, above] = True
            above = parents[above]
        if above >= first:
            mask[row] |= mask[above - first]
    return mask


def full_mask(context: int, parents: Sequence[int], new: int) -> npt.NDArray[np.bool_]:
    """``[new, context + len(parents)]``: the whole context, then ``tree_mask``."""
    mask = np.ones((new, context + len(parents)), dtype=np.bool_)
    mask[:, context:] = tree_mask(parents, new)
    return mask


def windowed(
    mask: npt.NDArray[np.bool_], context: int, parents: Sequence[int], window: int
) -> npt.NDArray[np.bool_]:
    """``mask`` from ``full_mask`` without slots that are ``window`` or more positions back.

    A tree row's position follows from its depth: a row with a context parent is at ``context``.
    """
    total = mask.shape[1]
    if total <= window:
        return mask
    positions = np.arange(total)
    for at, above in enumerate(parents):
        positions[context + at] = context if above < 0 else positions[context + above] + 1
    rows = positions[total - mask.shape[0] :, None]
    return mask & (rows - positions[None, :] < window)
