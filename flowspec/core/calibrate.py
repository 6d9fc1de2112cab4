"""What a candidate is worth: an online table of acceptance by source, rank and gap.

Where a drafter's numbers are no probabilities of acceptance (it saw the target's noise, or several
drafters speak at once) a node's value is what such candidates were worth so far. A cell
counts how often a candidate of that source, rank and gap was the target's token; before anything is known
it holds a prior. The gap of a coupled candidate is how far it lies behind its source's best, of the best
itself how far it leads; of an uncoupled one it is its own log-probability, negated. Rank says who is asked
first, the value what to expect: the two are kept apart (``design.md`` 4).
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowspec.core.tree import Expansion, Node

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Upper ends of the gap's cells, in nats.
EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
CELLS = len(EDGES) + 1
#: The lead of a candidate that came alone, nats.
ALONE = 2.0
#: Ranks from this one on share a cell.
RANKS = 16
#: How many observations the prior counts for.
PRIOR_WEIGHT = 6.0
#: Observations a cell holds before it halves what it has: what was true many jobs ago is outvoted by this one.
REMEMBERED = 400
#: No value says certainty: the log of it would make every descendant as good as its ancestor.
MOST = 0.98

_TOP, _LEAST = math.log(MOST), math.log(1e-4)
#: Cells of one source.
_BLOCK = RANKS * CELLS
_EDGES = np.array(EDGES)


class _Table(ABC):
    """Cells by number, with what every one says; ``say``: of a block of cells nothing is known of."""

    def __init__(self, coupled: bool, say: Floats) -> None:
        self._coupled, self._say = coupled, say
        self._says = say.copy()
        self._cells: dict[int, tuple[float, float]] = {}  # what was tried or promised, and hits

    def expansion(self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()) -> Expansion:
        """The candidates with calibrated values, best first; ``values`` are the drafter's own."""
        cells = _cells(values, sources, coupled=self._coupled)
        worth = self._worth(np.array(values), self._look_up(np.array(cells, np.int64))).tolist()
        return _best_first(worth, tokens, cells, values)

    def expansions(
        self, tokens: Sequence[Sequence[int]], values: Sequence[Sequence[float]],
        sources: Sequence[Sequence[int]] = (), source: int = 0,
    ) -> list[Expansion]:  # fmt: skip
        """Those of the nodes of one pass. ``sources`` left out: every candidate is of ``source``."""
        if sources or len({len(row) for row in values}) != 1 or not values[0]:
            rows = sources or [(source,) * len(row) for row in values]
            return [self.expansion(*row) for row in zip(tokens, values, rows, strict=True)]
        own = np.array(values)
        cells = _cells_of_pass(own, source, coupled=self._coupled)
        worth = self._worth(own, self._look_up(cells))
        best = np.argsort(-worth, axis=1, kind="stable")
        columns = (np.array(tokens), worth, cells, own)
        ordered = [np.take_along_axis(column, best, axis=1).tolist() for column in columns]
        return [Expansion(*map(tuple, row)) for row in zip(*ordered, strict=True)]

    @abstractmethod
    def _worth(self, own: Floats, says: Floats) -> Floats:
        """Logs, of the drafter's ``own`` values and what their cells say."""

    def _look_up(self, cells: Ints) -> Floats:
        while cells.size and cells.max() >= self._says.size:
            self._says = np.concatenate((self._says, self._say))
        return self._says[cells]


def _forgetting(cell: tuple[float, float], held: float) -> tuple[float, float]:
    """Half of what a cell has, once it holds more than it is to remember."""
    return (cell[0] / 2, cell[1] / 2) if held > REMEMBERED else cell


class Calibration(_Table):
    """A table of one job or several; ``coupled``: the drafters see the target's noise."""

    def __init__(self, coupled: bool) -> None:
        self._priors = [self._prior(*divmod(cell, CELLS), coupled=coupled) for cell in range(_BLOCK)]
        super().__init__(coupled, np.array([_bounded(prior) for prior in self._priors]))

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        for candidate, cell in zip(node.expansion.tokens, node.expansion.cells, strict=False):
            prior = (PRIOR_WEIGHT, PRIOR_WEIGHT * self._priors[cell % _BLOCK])
            before = self._cells.get(cell, prior)
            tries, hits = _forgetting(before, before[0])
            tries, hits = tries + 1, hits + (candidate == token)
            self._cells[cell], self._says[cell] = (tries, hits), _bounded(hits / tries)

    def _worth(self, own: Floats, says: Floats) -> Floats:
        return says

    @staticmethod
    def _prior(rank: int, bucket: int, *, coupled: bool) -> float:
        """Expected acceptance before anything was seen: a lead helps the first, a lag hurts the others."""
        middle = (0.0, *EDGES)[bucket]
        if not coupled:
            return math.exp(-middle)
        if rank == 0:
            return 0.3 + 0.5 * (1 - math.exp(-middle / 2))
        return 0.25 / (rank + 1) * math.exp(-middle / 4)


def _bounded(share: float) -> float:
    """The log of ``share``, neither certainty nor nothing."""
    return min(_TOP, max(_LEAST, math.log(share))) if share > 0 else _LEAST


class Scaling(_Table):
    """A table for drafters that give log-probabilities and do not see the noise: how far to believe them.

    A cell counts what its candidates promised and how often they were right; their values are scaled by the
    ratio. A small model is too modest where the target takes its best token, and promises too much below.
    """

    def __init__(self) -> None:
        super().__init__(False, np.zeros(_BLOCK))

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        found = node.expansion
        for candidate, cell, value in zip(found.tokens, found.cells, found.raw, strict=True):
            before = self._cells.get(cell, (0.0, 0.0))
            promised, hits = _forgetting(before, sum(before))
            promised, hits = promised + math.exp(value), hits + (candidate == token)
            self._cells[cell], self._says[cell] = (promised, hits), math.log((hits + 1) / (promised + 1))

    def _worth(self, own: Floats, says: Floats) -> Floats:
        return np.minimum(own + says, _TOP)


def _cells_of_pass(values: Floats, source: int, *, coupled: bool) -> Ints:
    """``[nodes, candidates]``: the cell of every candidate, all of one source; as ``_cells`` has it."""
    count = values.shape[1]
    ranks, gaps = np.tile(np.arange(count), (len(values), 1)), -values
    if coupled:
        leads = values[:, 0] >= 0
        gaps[leads, 0] = values[leads, 0] - values[leads, 1] if count > 1 else ALONE
        ranks[~leads] += 1
    found: Ints = (source * RANKS + np.minimum(ranks, RANKS - 1)) * CELLS + _EDGES.searchsorted(gaps)
    return found


def _cells(values: Sequence[float], sources: Sequence[int], *, coupled: bool = False) -> list[int]:
    """For every candidate the number of its cell: by its source, its rank there and its gap, nats."""
    if sources and min(sources) != max(sources):
        return _cells_of_several(values, sources, coupled)
    found, least = [], (sources[0] if sources else 0) * RANKS * CELLS
    first, last = least, least + (RANKS - 1) * CELLS
    if coupled and values:
        if values[0] < 0:  # its best was credited to another one: there a best has value 0
            first += CELLS
        else:
            found, first, values = [least + bisect_left(EDGES, _lead(values))], first + CELLS, values[1:]
    for value in values:
        found.append(first + bisect_left(EDGES, -value))
        if first < last:
            first += CELLS
    return found


def _cells_of_several(values: Sequence[float], sources: Sequence[int], coupled: bool) -> list[int]:
    """Each source's candidates have ranks of their own."""
    found = [0] * len(values)
    for source in set(sources):
        places = [at for at, named in enumerate(sources) if named == source]
        own = _cells([values[at] for at in places], (source,), coupled=coupled)
        for at, cell in zip(places, own, strict=True):
            found[at] = cell
    return found


def _best_first(worth: list[float], tokens: Sequence[int], cells: list[int], raw: Sequence[float] = ()) -> Expansion:
    """All by falling ``worth``, equals in the order they came."""
    if len(worth) < 2:
        return Expansion(tuple(tokens), tuple(worth), tuple(cells), tuple(raw))
    pick = operator.itemgetter(*sorted(range(len(worth)), key=worth.__getitem__, reverse=True))
    return Expansion(pick(tokens), pick(worth), pick(cells), pick(raw) if raw else ())


def _lead(values: Sequence[float]) -> float:
    """How far a source's best is ahead of its second; of a lone candidate nobody knows: something in between."""
    return values[0] - values[1] if len(values) > 1 else ALONE
