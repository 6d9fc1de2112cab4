"""Choices from rows of logits, over a large vocabulary by looking at the best tokens only.

Each function gives, row by row, exactly what its definition in ``core/run/sampling.py`` gives. The
model's device finds candidates that are sure to contain the result; the host then compares them
with the definition's own float64 arithmetic, so that the device has no influence on the choice.
Rows beyond the limits of a float64 comparison are left to the definition, and so are draws over a
small vocabulary, whose noise is kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.core.run.loud import QUIET
from flowspec.core.run.sampling import (
    OUTSIDE,
    Floats,
    Ids,
    Sampling,
    choose,
    gumbel,
    gumbel_of,
    key,
    nucleus_size,
    perturbed,
)
from flowspec.model.sampling.logit_rows import Entries, LogitRows, on_host
from flowspec.model.sampling.noise import loud_of

#: Temperatures at which distinct 32-bit logits keep distinct, finite scores.
_TEMPERATURES = (1e-30, 1e30)
#: A share this near to top-p may lie on either side of it, as sums depend on their order.
_EDGE = 1e-12
#: A vocabulary up to this size is drawn from as a whole: of 4,096 tokens the best of a row takes 10
#: us so, and 40 to 300 by its loud and its likely tokens; the best 64 take 70 us, and 600 to 1,700.
SMALL_VOCABULARY = 8192
#: Bins of the histogram of a row whose nucleus is wide.
_BINS = 2048


def choose_rows(
    logits: torch.Tensor, sampling: Sampling, indices: Sequence[int]
) -> tuple[int, ...]:
    """``choose`` for every row of ``logits``, ``[rows, vocabulary]``, at its own index."""
    table = None if _by_definition(logits, sampling) else LogitRows(logits)
    if table is None or not _comparable(table, sampling):
        rows = zip(on_host(logits), indices, strict=True)
        return tuple(choose(row, sampling, index) for row, index in rows)
    if sampling.temperature == 0:
        return tuple(table.argmax().tolist())
    if _truncated(sampling):
        return _truncated_choices(table, sampling, indices)
    return tuple(int(ids[0]) for ids, _ in _ranked(_Noisy(table, sampling, indices), 1))


def _truncated_choices(
    table: LogitRows, sampling: Sampling, indices: Sequence[int]
) -> tuple[int, ...]:
    kept = _survivors(table, sampling)
    wide = [row for row, found in enumerate(kept) if found is None]
    drawn: dict[int, int] = {}
    if wide:
        part = table if len(wide) == table.count else LogitRows(table.logits[wide])
        edges = _edges(part, sampling, [None] * len(wide))
        noisy = _Noisy(part, sampling, [indices[row] for row in wide], edges, math.inf)
        best = _ranked(noisy, 1)
        drawn = {row: int(ids[0]) for row, (ids, _) in zip(wide, best, strict=True)}
    for row, (found, index) in enumerate(zip(kept, indices, strict=True)):
        if found is not None:
            ids, scores = found
            drawn[row] = int(ids[np.argmax(scores + gumbel(sampling.seed, index, ids))])
    return tuple(drawn[row] for row in range(table.count))


def perturbed_rows(
    logits: torch.Tensor, sampling: Sampling, indices: Sequence[int], count: int
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """``perturbed`` for every row of ``logits``, ``[rows, vocabulary]``, at its own index."""
    table = None if _by_definition(logits, sampling) else LogitRows(logits)
    if table is None or not _comparable(table, sampling):
        rows = zip(on_host(logits), indices, strict=True)
        return [perturbed(row, sampling, index, count) for row, index in rows]
    edges = None
    if _truncated(sampling):
        edges = _edges(table, sampling, _survivors(table, sampling))
    noisy = _Noisy(table, sampling, indices, edges, OUTSIDE)
    return [
        (tuple(ids.tolist()), tuple((scores - scores[0]).tolist()))
        for ids, scores in _ranked(noisy, count)
    ]


def top_logprobs(
    logits: torch.Tensor, count: int, chosen: Sequence[int] | None = None
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The ``count`` most likely tokens of each row at T = 1, and their log-probabilities.

    Best first, ties to the lower id. ``chosen``: for each row a token that is added at the end if
    it is not among them.
    """
    table = LogitRows(logits)
    count = min(count, table.vocabulary)
    sums = table.peaks + np.log(table.masses(1.0))
    best = []
    entries = table.at_least(table.floors(count)).by_row(table.count)
    for (ids, values), total in zip(entries, sums, strict=True):
        order = np.argsort(-values, kind="stable")[:count]
        logprobs = np.minimum(values[order] - total, 0.0)
        best.append((tuple(ids[order].tolist()), tuple(logprobs.tolist())))
    if chosen is None:
        return best
    taken = table.take(np.arange(table.count), np.asarray(chosen)) - sums
    values = np.minimum(taken, 0.0).tolist()
    return [
        (ids, logprobs) if token in ids else ((*ids, token), (*logprobs, value))
        for (ids, logprobs), token, value in zip(best, chosen, values, strict=True)
    ]


def _by_definition(logits: torch.Tensor, sampling: Sampling) -> bool:
    """Whether the definition itself, which reads the whole vocabulary, is the faster one.

    On the host it is for the best token: of 49,152 that takes 14 us, and 94 by its blocks.
    """
    if sampling.temperature == 0:
        return logits.device.type == "cpu"
    return not _truncated(sampling) and logits.shape[-1] <= SMALL_VOCABULARY


def _truncated(sampling: Sampling) -> bool:
    return bool(sampling.top_k) or sampling.top_p < 1


def _comparable(table: LogitRows, sampling: Sampling) -> bool:
    """Whether comparisons of logits decide as comparisons of scores do."""
    lowest, highest = _TEMPERATURES
    return (
        table.logits.dtype != torch.float64
        and bool(np.isfinite(table.peaks).all())
        and (sampling.temperature == 0 or lowest <= sampling.temperature <= highest)
    )


def _survivors(table: LogitRows, sampling: Sampling) -> list[tuple[Ids, Floats] | None]:
    """``survivors`` of each row; None if the best tokens of its blocks do not bound them."""
    masses = None
    if sampling.top_k:
        floors = table.floors(sampling.top_k)
    else:
        masses = table.masses(sampling.temperature)
        floors = _nucleus_floors(table, sampling, masses)
    kept: list[tuple[Ids, Floats] | None] = []
    # A row without a floor asks for no token here.
    entries = table.at_least(np.where(np.isfinite(floors), floors, np.inf))
    for row, (ids, logits) in enumerate(entries.by_row(table.count)):
        order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
        scores = logits[order] / sampling.temperature
        count = len(order)
        if masses is not None:
            count = _nucleus_size(scores, sampling.top_p, masses[row])
        elif count and sampling.top_p < 1:
            count = nucleus_size(scores, sampling.top_p)
        kept.append((ids[order[:count]], scores[:count]) if count else None)
    return kept


def _edges(
    table: LogitRows, sampling: Sampling, kept: Sequence[tuple[Ids, Floats] | None]
) -> tuple[Floats, Ids]:
    """Logit and id of the last survivor of each row, given its survivors where they are known."""
    work = _Work(table.vocabulary if None in kept else 0)
    last = np.array(
        [
            _last_survivor(table.row(row), sampling, work) if found is None else int(found[0][-1])
            for row, found in enumerate(kept)
        ]
    )
    return table.take(np.arange(table.count), last), last


class _Work:
    """Arrays of a whole row that are used again for the next: new ones cost more than the sums."""

    def __init__(self, size: int) -> None:
        self.shares = np.empty(size)
        self.gaps = np.empty(size, np.float32)
        self.bins = np.empty(size, np.int64)


def _last_survivor(row: npt.NDArray[np.floating[Any]], sampling: Sampling, work: _Work) -> int:
    """The last id of ``survivors``, without an order of ids: values are sorted ten times faster."""
    if not sampling.top_k:
        end = _nucleus_end(row, sampling, work)
        if end is not None:
            return end
    best = -np.sort(-row)[: sampling.top_k or None]
    count = len(best)
    if sampling.top_p < 1:
        count = nucleus_size(best.astype(np.float64) / sampling.temperature, sampling.top_p)
    edge = best[count - 1]
    better = int(np.count_nonzero(row > edge))
    return int(np.flatnonzero(row == edge)[count - better - 1])


def _nucleus_end(row: npt.NDArray[np.floating[Any]], sampling: Sampling, work: _Work) -> int | None:
    """The nucleus's last id, from a histogram of which only one bin is sorted.

    None if the order of a sum would decide.
    """
    peak, lowest = row.max(), row.min()
    shares = work.shares
    gaps = work.gaps
    bins = work.bins
    np.divide(row, sampling.temperature, out=shares, dtype=np.float64)
    np.subtract(shares, np.float64(peak) / sampling.temperature, out=shares)
    np.exp(shares, out=shares)
    span = float(peak - lowest) if lowest > -np.inf else 40 * sampling.temperature
    np.subtract(peak, row, out=gaps)
    np.multiply(gaps, np.float32(_BINS / max(span, 1e-30)), out=gaps)
    np.minimum(gaps, _BINS - 1, out=gaps)
    np.copyto(bins, gaps, casting="unsafe")
    masses = np.bincount(bins, weights=shares, minlength=_BINS)
    reached = np.cumsum(masses)
    end = int(np.searchsorted(reached, sampling.top_p * reached[-1]))
    ids = np.flatnonzero(bins == end)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    above = reached[end] - masses[end]
    before = np.concatenate([[above], above + np.cumsum(shares[ids])]) / reached[-1]
    if (np.abs(before - sampling.top_p) < _EDGE).any():
        return None
    return int(ids[np.count_nonzero(before[:-1] < sampling.top_p) - 1])


def _nucleus_floors(table: LogitRows, sampling: Sampling, masses: Floats) -> Floats:
    """For each row a logit such that the tokens that reach it hold the nucleus.

    Infinite if the best tokens of the blocks do not suffice for it.
    """
    best = -np.sort(-table.maxima, axis=1)
    shares = np.exp(best / sampling.temperature - (table.peaks / sampling.temperature)[:, None])
    enough = sampling.top_p * masses * (1 + 1e-9)
    reached = np.cumsum(shares, axis=1) >= enough[:, None]
    floors: Floats = best[np.arange(table.count), reached.argmax(axis=1)]
    return np.where(reached.any(axis=1), floors, np.inf)


def _nucleus_size(scores: Floats, top_p: float, mass: float) -> int:
    """As ``nucleus_size``, given the best scores only; 0 if the order of a sum would decide."""
    shares = np.exp(scores - scores[:1])
    before = (np.cumsum(shares) - shares) / mass
    if (np.abs(before - top_p) < _EDGE).any():
        return 0
    return int(np.count_nonzero(before < top_p))


def _ranked(noisy: _Noisy, count: int) -> list[tuple[Ids, Floats]]:
    """The ``count`` best tokens of each row with noise, best first, and their scores.

    The loud tokens' scores bound the last place from below; a token that is not loud needs a logit
    near the best to reach it.
    """
    table = noisy.table
    rows, ids = noisy.loud()
    logits = table.take(rows, ids)
    last = _last_places(rows, noisy.scores(rows, ids, logits), table.count, count)
    near = table.at_least(noisy.floors(last, count))
    rows = np.concatenate([rows, near.rows])
    ids = np.concatenate([ids, near.ids])
    logits = np.concatenate([logits, near.logits])
    scores = noisy.scores(rows, ids, logits)
    reach = np.flatnonzero(scores >= last[rows])
    rows = rows[reach]
    ids = ids[reach]
    logits = logits[reach]
    scores = scores[reach]
    # Survivors are drawn best first, so that the better one of equal scores wins.
    first = -logits if noisy.penalty == math.inf else ids
    order = np.lexsort((ids, first, -scores, rows))
    rows = rows[order]
    ids = ids[order]
    scores = scores[order]
    # A loud token with a logit near the best was found twice.
    once = np.ones(len(ids), np.bool_)
    once[1:] = (rows[1:] != rows[:-1]) | (ids[1:] != ids[:-1])
    ranked = Entries(rows[once], ids[once], scores[once]).by_row(table.count)
    return [(ids[:count], scores[:count]) for ids, scores in ranked]


def _last_places(rows: Ids, scores: Floats, rows_count: int, count: int) -> Floats:
    """The ``count``-th best score of each row, minus infinity where there are fewer."""
    ends = np.searchsorted(rows, np.arange(1, rows_count))
    return np.array(
        [
            -np.partition(-part, count - 1)[count - 1] if len(part) >= count else -np.inf
            for part in np.split(scores, ends)
        ]
    )


class _Noisy:
    """Scores with noise, less ``penalty`` outside the survivors, whose last ones are ``edges``."""

    def __init__(
        self,
        table: LogitRows,
        sampling: Sampling,
        indices: Sequence[int],
        edges: tuple[Floats, Ids] | None = None,
        penalty: float = 0.0,
    ) -> None:
        self.table = table
        self.penalty = penalty
        self._temperature = sampling.temperature
        self._keys = np.array([key(sampling.seed, index) for index in indices], np.uint64)
        self._loud = loud_of(sampling.seed, indices, table.vocabulary, table.logits.device)
        self._edges = edges

    def loud(self) -> tuple[Ids, Ids]:
        """Rows and ids of the loud tokens."""
        rows = np.repeat(np.arange(len(self._loud)), [len(ids) for ids, _ in self._loud])
        return rows, np.concatenate([ids for ids, _ in self._loud])

    def scores(self, rows: Ids, ids: Ids, logits: Floats) -> Floats:
        scores: Floats = logits / self._temperature + gumbel_of(self._keys[rows], ids)
        if self._edges is not None:
            edge, last = self._edges[0][rows], self._edges[1][rows]
            scores[(logits < edge) | ((logits == edge) & (ids > last))] -= self.penalty
        return scores

    def floors(self, last: Floats, count: int) -> Floats:
        """The logit of each row that a token that is not loud needs for the score ``last``."""
        slack = 1e-9 * (np.abs(last) + 1)
        floors: Floats = (last - QUIET - slack) * self._temperature
        if count == 1:
            # The best token's logit is finite: tokens that are ruled out need not be looked at.
            floors = np.maximum(floors, np.finfo(np.float32).min)
        if self._edges is not None:
            outside = floors + self.penalty * self._temperature
            floors = np.minimum(np.maximum(floors, self._edges[0]), outside)
        return floors
