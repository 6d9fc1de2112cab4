"""Rows between torch and numpy, bfloat16 included."""

from __future__ import annotations

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
