"""What a candidate is worth: an online table of acceptance by source, rank and gap.

Where a drafter's numbers are no probabilities of acceptance (it saw the target's noise, or
several drafters speak at once) a node's value is what such candidates were worth so far. A cell
counts how often a candidate of that source, rank and gap was the target's token; before anything
is known it holds a prior. The gap of a coupled candidate is how far it lies behind its source's
best, of the best itself how far it leads; of an uncoupled one it is its own log-probability,
negated. Rank says who is asked first, the value what to expect: the two are kept apart
(``design.md`` 4).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.tree.tree import Expansion, Node

#: Upper ends of the gap's cells, in nats.
EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
CELLS = len(EDGES) + 1
#: The lead of a candidate that came alone, nats.
ALONE = 2.0
#: Ranks from this one on share a cell.
RANKS = 16
#: How many observations the prior counts for.
PRIOR_WEIGHT = 6.0
#: Observations a cell holds before it halves what it has: what was true many jobs ago is outvoted
#: by this one.
REMEMBERED = 400
#: No value says certainty: the log of it would make every descendant as good as its ancestor.
MOST = 0.98

_TOP = math.log(MOST)


@dataclass(slots=True)
class _Cell:
    tries: float
    hits: float
    value: float = 0.0  # the log of their ratio, within bounds

    def __post_init__(self) -> None:
        self.value = math.log(min(MOST, max(1e-4, self.hits / self.tries)))


class Calibration:
    """A table of one job or several; ``coupled``: the drafters see the target's noise."""

    def __init__(self, coupled: bool) -> None:
        self._coupled = coupled
        self._cells: dict[int, _Cell] = {}

    def expansion(
        self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()
    ) -> Expansion:
        """The candidates with calibrated values, best first; ``values`` are the drafter's own."""
        cells = _cells(values, sources, coupled=self._coupled)
        known = self._cells
        worth = [known[cell].value if cell in known else self._unknown(cell) for cell in cells]
        return _best_first(worth, tokens, cells)

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        for candidate, cell in zip(node.expansion.tokens, node.expansion.cells, strict=False):
            entry = self._cells[cell]
            share = 0.5 if entry.tries > REMEMBERED else 1.0
            self._cells[cell] = _Cell(
                share * entry.tries + 1, share * entry.hits + (candidate == token)
            )

    def _unknown(self, number: int) -> float:
        cell = self._cells[number] = _Cell(PRIOR_WEIGHT, PRIOR_WEIGHT * self._prior(number))
        return cell.value

    def _prior(self, number: int) -> float:
        """Expected acceptance before anything was seen: a lead helps the first, a lag hurts the
        others.
        """
        rank = number // CELLS % RANKS
        bucket = number % CELLS
        middle = (0.0, *EDGES)[bucket]
        if not self._coupled:
            return math.exp(-middle)
        if rank == 0:
            return 0.3 + 0.5 * (1 - math.exp(-middle / 2))
        return 0.25 / (rank + 1) * math.exp(-middle / 4)


class Scaling:
    """A table for drafters that give log-probabilities and do not see the noise: how far to believe
    them.

    A cell counts what its candidates promised and how often they were right; their values are
    scaled by the ratio. A small model is too modest where the target takes its best token, and
    promises too much below.
    """

    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, float]] = {}  # promised, hits
        self._scales: dict[int, float] = {}  # logs of their ratios

    def expansion(
        self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()
    ) -> Expansion:
        """The candidates with scaled values, best first; ``values`` are the drafter's own."""
        cells = _cells(values, sources)
        scale = self._scales.get
        scaled = [value + scale(cell, 0.0) for value, cell in zip(values, cells, strict=True)]
        return _best_first(
            [value if value < _TOP else _TOP for value in scaled], tokens, cells, values
        )

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        found = node.expansion
        for candidate, cell, value in zip(found.tokens, found.cells, found.raw, strict=True):
            promised, hits = self._cells.get(cell, (0.0, 0.0))
            share = 0.5 if promised + hits > REMEMBERED else 1.0
            promised = share * promised + math.exp(value)
            hits = share * hits + (candidate == token)
            self._cells[cell] = (promised, hits)
            self._scales[cell] = math.log((hits + 1) / (promised + 1))


class Calibrations:
    """A pipeline's tables: candidates of coupled and of sampled jobs are accepted differently."""

    def __init__(self) -> None:
        self._tables: dict[tuple[bool, bool], Calibration | Scaling] = {}

    def table(self, *, coupled: bool, sampled: bool) -> Calibration | Scaling:
        """The table of jobs with a temperature (``sampled``), or of those among them whose drafter
        sees the target's noise (``coupled``).
        """
        key = (coupled, sampled)
        if key not in self._tables:
            self._tables[key] = Calibration(True) if coupled else Scaling()
        return self._tables[key]


def _cells(values: Sequence[float], sources: Sequence[int], *, coupled: bool = False) -> list[int]:
    """For every candidate the number of its cell: by its source, its rank there and
    its gap, nats.
    """
    if sources and min(sources) != max(sources):
        return _cells_of_several(values, sources, coupled)
    found = []
    least = (sources[0] if sources else 0) * RANKS * CELLS
    first = least
    last = least + (RANKS - 1) * CELLS
    if coupled and values:
        if values[0] < 0:  # its best was credited to another one: there a best has value 0
            first += CELLS
        else:
            found = [least + bisect_left(EDGES, _lead(values))]
            first = first + CELLS
            values = values[1:]
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


def _best_first(
    worth: list[float], tokens: Sequence[int], cells: list[int], raw: Sequence[float] = ()
) -> Expansion:
    """All by falling ``worth``, equals in the order they came."""
    if len(worth) < 2:
        return Expansion(tuple(tokens), tuple(worth), tuple(cells), tuple(raw))
    pick = operator.itemgetter(*sorted(range(len(worth)), key=worth.__getitem__, reverse=True))
    return Expansion(pick(tokens), pick(worth), pick(cells), pick(raw) if raw else ())


def _lead(values: Sequence[float]) -> float:
    """How far a source's best is ahead of its second; of a lone candidate nobody knows: something
    in between.
    """
    return values[0] - values[1] if len(values) > 1 else ALONE
