"""The choice of a target token: argmax, or a draw keyed by (seed, index, token).

With a temperature the choice is Gumbel-max over the processed distribution: the token that
maximises ``logit / T + g``, where ``g = -log(-log u)`` and ``u`` is a 53-bit hash of (seed,
absolute index in prompt + output, token id). The choice depends on nothing else, so every strategy,
stage count and machine chooses the same token from the same logits. Source:
docs/algorithms.md#keyed-draw; the coupling is that of arXiv 2408.07978.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.errors import JobError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BELOW_1 = 1.0 - 2.0**-53
#: Largest seed accepted: 63 bits, a plain integer in every client.
MAX_SEED = (1 << 63) - 1
#: A temperature below it is 0: noise spans 41 nats, so only logits closer than .0004 could change
#: places, and quotients of larger ones stay far from the end of float64.
LEAST_TEMPERATURE = 1e-5
#: Largest top-k accepted, far above any vocabulary.
MAX_TOP_K = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's token is chosen.

    ``temperature`` 0 is greedy and ignores the rest; below ``LEAST_TEMPERATURE`` it is 0. ``top_k``
    0 and ``top_p`` 1 keep every token. They apply in the order temperature, top-k, top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise JobError(
                f"is {self.temperature}; expected a number of 0 (greedy) or more", "temperature"
            )
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise JobError(
                f"is {self.top_k}; expected 0 (off) or a number of tokens up to {MAX_TOP_K}",
                "top_k",
            )
        if not 0 < self.top_p <= 1:
            raise JobError(
                f"is {self.top_p}; expected a share above 0 and at most 1 (off)", "top_p"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise JobError(f"is {self.seed}; expected an integer from 0 to {MAX_SEED}", "seed")


#: Penalty in a coupled draft for a candidate outside the drafter's own nucleus, in nats. Such a
#: candidate is not excluded, because the target's nucleus may differ. At T = 0.6, top-p 0.9,
#: top-k 80 a penalty of 5 measured better than 2.
OUTSIDE = 5.0


def _mix(x: int) -> int:
    """SplitMix64's finaliser, modulo 2^64."""
    x = (x ^ (x >> 30)) * MIX_1 & _MASK
    x = (x ^ (x >> 27)) * MIX_2 & _MASK
    return x ^ (x >> 31)


def key(seed: int, index: int) -> int:
    """64 bits that the draws of every token at ``index`` start from."""
    return _mix(_mix((seed + GOLDEN) & _MASK) ^ _mix((index * 0xD1B54A32D192ED03 + 1) & _MASK))


def _uniform(keys: npt.NDArray[np.uint64], tokens: Ids) -> Floats:
    x = keys + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return _between_0_and_1((x ^ (x >> np.uint64(31))) >> np.uint64(11))


def uniform(seed: int, index: int, tokens: npt.ArrayLike) -> Floats:
    """One draw per token id of ``tokens`` at ``index``: float64 strictly between 0 and 1."""
    return _uniform(np.array([key(seed, index)], np.uint64), np.asarray(tokens, np.int64))


def _between_0_and_1(bits: npt.NDArray[np.uint64]) -> Floats:
    """53-bit integers as numbers strictly between 0 and 1."""
    # 2^53 - 1 + 0.5 has no float64 of its own and rounds to 2^53, which would be 1.
    return np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, _BELOW_1)


def gumbel(seed: int, index: int, tokens: npt.ArrayLike) -> Floats:
    """Standard Gumbel noise for ``tokens`` at ``index``: ``-log(-log u)``, float64."""
    noise: Floats = -np.log(-np.log(uniform(seed, index, tokens)))
    return noise


def gumbel_of(keys: npt.NDArray[np.uint64], tokens: Ids) -> Floats:
    """``gumbel`` of element-wise pairs of a ``key`` and a token id."""
    noise: Floats = -np.log(-np.log(_uniform(keys, tokens)))
    return noise


@lru_cache(maxsize=64)
def _whole_vocabulary_noise(seed: int, index: int, size: int) -> Floats:
    noise = gumbel(seed, index, np.arange(size))
    noise.flags.writeable = False
    return noise


def survivors(logits: npt.NDArray[Any], sampling: Sampling) -> tuple[Ids, Floats]:
    """Token ids that survive top-k and top-p, best first, and their scores ``logit / T``.

    ``logits``: one row, ``[vocabulary]``. Ties go to the lower token id, so exactly ``top_k``
    tokens survive. Top-p keeps the shortest prefix whose probability reaches ``top_p``.
    """
    scores = np.asarray(logits, dtype=np.float64) / sampling.temperature
    count = min(sampling.top_k or scores.size, scores.size)
    if sampling.top_p < 1:
        # Equal scores have equal shares, so values suffice: sorting ids takes ten times as long.
        count = nucleus_size(np.sort(-scores)[:count] * -1.0, sampling.top_p)
    ids = _best(scores, count)
    return ids, scores[ids]


def nucleus_size(scores: Floats, top_p: float) -> int:
    """Length of the shortest prefix of ``scores``, best first, whose probability is ``top_p``."""
    shares = np.exp(scores - scores[0])
    before = (np.cumsum(shares) - shares) / shares.sum()
    return int(np.count_nonzero(before < top_p))


def choose(logits: npt.NDArray[Any], sampling: Sampling, index: int) -> int:
    """The target's token at absolute ``index``, given one row of its logits, ``[vocabulary]``."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    if not sampling.top_k and sampling.top_p >= 1:
        scores = np.asarray(logits, dtype=np.float64) / sampling.temperature
        return int(np.argmax(scores + _whole_vocabulary_noise(sampling.seed, index, scores.size)))
    ids, kept = survivors(logits, sampling)
    return int(ids[np.argmax(kept + gumbel(sampling.seed, index, ids))])


def perturbed(
    logits: npt.NDArray[Any], sampling: Sampling, index: int, count: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A drafter's ``count`` best tokens at absolute ``index`` under the target's noise.

    Ranked by ``log softmax(logits / T) + g``, best first, with scores relative to the best one's. A
    drafter that agrees with the target on the logits agrees with it on the draw. A token that the
    job's top-k or top-p would cut from the drafter's own distribution is penalised by ``OUTSIDE``:
    noise alone must not rank it above tokens that the target may still draw. Needs a temperature
    above 0.
    """
    scores = np.asarray(logits, dtype=np.float64) / sampling.temperature
    scores = scores + _whole_vocabulary_noise(sampling.seed, index, scores.size)
    if sampling.top_k or sampling.top_p < 1:
        outside = np.ones(scores.size, dtype=np.bool_)
        outside[survivors(logits, sampling)[0]] = False
        scores[outside] -= OUTSIDE
    best = _best(scores, count)
    return tuple(best.tolist()), tuple((scores[best] - scores[best[0]]).tolist())


def _best(scores: Floats, count: int) -> Ids:
    """Ids of the ``count`` best scores, best first, ties to the lower id."""
    worse = -scores
    ids = np.arange(scores.size)
    if count < scores.size:
        # Only what reaches the last place is sorted: the whole vocabulary takes ten times as long.
        ids = np.flatnonzero(~(worse > np.partition(worse, count - 1)[count - 1]))
    best: Ids = ids[np.argsort(worse[ids], kind="stable")[:count]]
    return best
