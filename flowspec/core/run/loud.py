"""The tokens of a vocabulary with much noise at one index, found from the hash's integers.

Noise above ``QUIET`` is rare: one token in 150. A token without it can win only with a logit near
the best, so a draw over a whole vocabulary needs the exact noise of a few hundred tokens. Source:
docs/algorithms.md#keyed-draw.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flowspec.core.run.sampling import GOLDEN, MIX_1, MIX_2, Floats, Ids, gumbel, key

#: Bits of the hash from which a token is loud. The last step of the hash leaves its upper 31 bits
#: as they are, so that they can be compared before it.
LOUD_BITS = math.ceil(math.exp(-math.exp(-5.0)) * 2**31) << 33
#: No token that is not loud has more noise, in nats.
QUIET = -math.log(-math.log(LOUD_BITS / 2**64)) + 1e-9

#: Tokens hashed at once: their intermediate values stay in the processor's cache.
_CHUNK = 32_768
_MASK = (1 << 64) - 1


@lru_cache(maxsize=256)
def loud(seed: int, index: int, size: int) -> tuple[Ids, Floats]:
    """Loud tokens of a vocabulary of ``size``, ascending, and their noise.

    Remembered, because the nodes of a tree share their indices.
    """
    start = key(seed, index)
    x = np.empty(min(_CHUNK, size), np.uint64)
    shifted = np.empty_like(x)
    found = []
    for first in range(0, size, _CHUNK):
        count = min(_CHUNK, size - first)
        offset = np.uint64((start + first * GOLDEN) & _MASK)
        hashed = _hashed(offset, x[:count], shifted[:count])
        found.append(np.flatnonzero(hashed >= np.uint64(LOUD_BITS)) + first)
    ids = np.concatenate(found)
    noise = gumbel(seed, index, ids)
    ids.flags.writeable = noise.flags.writeable = False
    return ids, noise


def _hashed(
    offset: np.uint64, x: npt.NDArray[np.uint64], shifted: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """The hash before its last step, in ``x``, of as many tokens."""
    np.add(_multiples()[: x.size], offset, out=x)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint64(factor), out=x)
    return x


@lru_cache(maxsize=1)
def _multiples() -> npt.NDArray[np.uint64]:
    """``(token + 1) * GOLDEN`` of the tokens of the first chunk, modulo 2^64."""
    return np.arange(1, _CHUNK + 1, dtype=np.uint64) * np.uint64(GOLDEN)
