"""Rows between torch and numpy, bfloat16 included, and of several parts in one tensor.

After a pass over a model's weights the processor's caches hold nothing of torch: its smallest
operation takes 50 us then. The usual pass, of one job over a few rows, leaves out what it can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flowspec.core.protocol.row_types import BFLOAT16
from flowspec.model.base import RowArray


def to_array(rows: torch.Tensor) -> RowArray:
    """``rows`` on the host, without a copy where that is possible."""
    host = rows.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(BFLOAT16)
    found: RowArray = host.numpy()
    return found


def to_tensor(rows: RowArray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``rows`` as a tensor of ``dtype`` on ``device``; never a view of read-only memory."""
    writeable = rows if rows.flags.writeable else rows.copy()
    if rows.dtype == BFLOAT16:
        held = torch.from_numpy(writeable.view(np.int16)).view(torch.bfloat16)
    else:
        held = torch.from_numpy(writeable)
    return held.to(device=device, dtype=dtype)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all ``parts``; a lone part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    """The reverse of ``joined``: ``counts`` rows to each part."""
    return (rows,) if len(counts) == 1 else torch.split(rows, list(counts))


def taken(rows: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The rows at ``places``; no copy where they lie one behind another."""
    first = places[0] if places else 0
    end = first + len(places)
    return rows[first:end] if [*places] == [*range(first, end)] else rows[[*places]]
