"""Rows of logits where the model left them, with access to their best tokens only.

A row is cut into blocks and only the blocks' maxima are brought to the host. Every question here
is for the tokens from some logit on, and only blocks that reach it are looked at. The same steps
serve every device; rows of float32, bfloat16 or float16 stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.core.run.sampling import Floats, Ids

#: Tokens per block: as fast to reduce as larger ones, and fewer tokens are fetched in vain.
BLOCK = 64
#: Logits of which the masses are computed together, if a row is not more.
_TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True)
class Entries:
    """Tokens of several rows, by row and then by id, with their logits as float64."""

    rows: Ids
    ids: Ids
    logits: Floats

    def by_row(self, count: int) -> list[tuple[Ids, Floats]]:
        """Ids and logits of each of ``count`` rows."""
        ends = np.searchsorted(self.rows, np.arange(1, count + 1)).tolist()
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        return [(self.ids[begin:end], self.logits[begin:end]) for begin, end in bounds]


class LogitRows:
    """Logits ``[rows, vocabulary]``.

    ``maxima`` are those of their blocks, ``[rows, blocks]``, ``peaks`` those of the rows.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits.contiguous()
        self.count, self.vocabulary = logits.shape
        whole = self.vocabulary // BLOCK
        self._blocks = self.logits[:, : whole * BLOCK].view(self.count, whole, BLOCK)
        self._rest = self.logits[:, whole * BLOCK :]  # less than a block
        parts = [self._blocks.amax(2)] if whole else []
        if self._rest.shape[1]:
            parts.append(self._rest.amax(1, keepdim=True))
        self.maxima: Floats = torch.cat(parts, dim=1).double().cpu().numpy()
        self.peaks: Floats = self.maxima.max(axis=1)

    def row(self, row: int) -> npt.NDArray[np.floating[Any]]:
        """One whole row on the host, float32 or float64."""
        whole: npt.NDArray[np.floating[Any]] = self._rows(row, row + 1)[0]
        return whole

    def _rows(self, begin: int, end: int) -> npt.NDArray[np.floating[Any]]:
        return on_host(self.logits[begin:end])

    def take(self, rows: Ids, ids: Ids) -> Floats:
        """The logits of pairs of a row and a token id."""
        places = torch.from_numpy(rows * self.vocabulary + ids).to(self.logits.device)
        taken: Floats = torch.take(self.logits, places).double().cpu().numpy()
        return taken

    def argmax(self) -> Ids:
        """The best token of each row, ties to the lower id."""
        ids = self.maxima.argmax(axis=1)[:, None] * BLOCK + np.arange(BLOCK)
        ids = np.minimum(ids, self.vocabulary - 1)
        rows = np.repeat(np.arange(self.count), BLOCK)
        logits = self.take(rows, ids.ravel()).reshape(ids.shape)
        best: Ids = ids[np.arange(self.count), logits.argmax(axis=1)]
        return best

    def at_least(self, least: Floats) -> Entries:
        """All tokens whose logit is not below that of their row in ``least``."""
        rows, blocks = np.nonzero(~(self.maxima < least[:, None]))
        logits = self._fetch(rows, blocks)
        fits = ~(logits < least[rows, None])
        # What fills up an incomplete block is no token.
        fits[blocks == self._blocks.shape[1], self._rest.shape[1] :] = False
        at, within = np.nonzero(fits)
        return Entries(rows[at], blocks[at] * BLOCK + within, logits[at, within].astype(np.float64))

    def _fetch(self, rows: Ids, blocks: Ids) -> npt.NDArray[np.floating[Any]]:
        """The logits of pairs of a row and a block, ``[pairs, BLOCK]``."""
        device = self.logits.device
        whole = self._blocks.shape[1]
        places = torch.from_numpy(rows), torch.from_numpy(np.minimum(blocks, whole - 1))
        if not self._rest.shape[1]:
            fetched = self._blocks[places[0].to(device), places[1].to(device)]
            return on_host(fetched)
        fetched = self.logits.new_zeros((len(rows), BLOCK))
        if whole:
            fetched[:] = self._blocks[places[0].to(device), places[1].to(device)]
        last = np.flatnonzero(blocks == whole)
        rest = self._rest[torch.from_numpy(rows[last]).to(device)]
        fetched[torch.from_numpy(last).to(device), : rest.shape[1]] = rest
        return on_host(fetched)

    def floors(self, count: int) -> Floats:
        """For each row a logit that at least ``count`` of its tokens reach, and few more do.

        Minus infinity if there are fewer tokens than that.
        """
        blocks = self.maxima.shape[1]
        if count > self.vocabulary:
            return np.full(self.count, -np.inf)
        if 2 * count > blocks:  # most tokens reach so low a block's best
            best = torch.topk(self.logits, count, dim=1, sorted=True).values
            return on_host(best[:, -1]).astype(np.float64)
        floors: Floats = np.partition(self.maxima, blocks - count, axis=1)[:, blocks - count]
        return floors

    def masses(self, temperature: float) -> Floats:
        """``sum(exp(logit / temperature - peak / temperature))`` of each row, in float64."""
        if self.logits.device.type != "cpu":
            return self.masses_at_once(temperature)
        # Some rows at a time stay in the processor's cache, and numpy's exp is the faster one.
        step = max(1, _TOGETHER // self.vocabulary)
        work = np.empty((min(step, self.count), self.vocabulary))
        begins = range(0, self.count, step)
        return np.concatenate([self._masses(at, at + step, temperature, work) for at in begins])

    def masses_at_once(self, temperature: float) -> Floats:
        """``masses`` where the logits are."""
        scores = self.logits.double() / temperature
        scores -= torch.from_numpy(self.peaks / temperature).to(scores.device)[:, None]
        sums: Floats = scores.exp_().sum(1).cpu().numpy()
        return sums

    def _masses(self, begin: int, end: int, temperature: float, work: Floats) -> Floats:
        """``masses`` of some rows; ``work`` has room for them."""
        peaks = self.peaks[begin:end, None]
        work = work[: len(peaks)]
        scores = self._rows(begin, end)
        if temperature != 1:
            scores = np.divide(scores, temperature, out=work, dtype=np.float64)
        np.subtract(scores, peaks / temperature, out=work, dtype=np.float64)
        np.exp(work, out=work)
        sums: Floats = work.sum(axis=1)
        return sums


def on_host(logits: torch.Tensor) -> npt.NDArray[np.floating[Any]]:
    """``logits`` on the host: float64 as they are, others as float32."""
    values = logits.cpu()
    if values.dtype != torch.float64:
        values = values.float()
    found: npt.NDArray[np.floating[Any]] = values.numpy()
    return found
