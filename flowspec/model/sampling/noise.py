"""The loud tokens of many indices at once, hashed on the device where the logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flowspec.core.run.loud import LOUD_BITS, loud
from flowspec.core.run.sampling import GOLDEN, MIX_1, MIX_2, Floats, Ids, gumbel, key

#: Hashes computed at once on an accelerator, 8 bytes each.
_AT_ONCE = 1 << 25


def loud_of(
    seed: int, indices: Sequence[int], size: int, device: torch.device
) -> list[tuple[Ids, Floats]]:
    """``loud`` at each of ``indices``, for a vocabulary of ``size``."""
    if device.type == "cpu":
        return [loud(seed, index, size) for index in indices]
    return loud_at_once(seed, indices, size, device)


def loud_at_once(
    seed: int, indices: Sequence[int], size: int, device: torch.device
) -> list[tuple[Ids, Floats]]:
    """``loud`` at each of ``indices``, each hashed once, by the device's own integers."""
    distinct = sorted(set(indices))
    found: dict[int, tuple[Ids, Floats]] = {}
    step = max(1, _AT_ONCE // size)
    for first in range(0, len(distinct), step):
        some = distinct[first : first + step]
        keys = [key(seed, index) for index in some]
        for index, ids in zip(some, _loud_tokens(keys, size, device), strict=True):
            found[index] = ids, gumbel(seed, index, ids)
    return [found[index] for index in indices]


def _loud_tokens(keys: Sequence[int], size: int, device: torch.device) -> list[Ids]:
    """The loud tokens of each of ``keys``, ascending."""
    starts = torch.tensor([_signed(key) for key in keys], device=device)
    x = torch.arange(1, size + 1, device=device) * _signed(GOLDEN) + starts[:, None]
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    # As signed integers the largest unsigned ones are those just below 0.
    places = ((x >= _signed(LOUD_BITS)) & (x < 0)).nonzero().cpu().numpy()
    ends = np.searchsorted(places[:, 0], np.arange(1, len(keys)))
    return np.split(places[:, 1], ends)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that fills with zeros, as of unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    """The signed integer with the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
