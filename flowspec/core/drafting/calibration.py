"""Calibrated values: an online table of acceptance rates by source, rank and gap.

A drafter's log-probabilities do not estimate acceptance if the drafter saw the target's noise, or
if several drafters are merged. A candidate's value is then the log of the acceptance rate that
candidates like it have had so far. A cell counts how often a candidate of one source, rank and
gap was the target's token; an empty cell holds a prior. The gap of a coupled candidate is its
distance to its source's best candidate, and for the best candidate its lead over the second; the
gap of an uncoupled candidate is its negated log-probability
(docs/algorithms.md#coupled-drafting, docs/algorithms.md#calibration).
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from flowspec.core.tree.tree import Expansion, Node

#: Upper bounds of the gap's buckets, in nats.
EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
CELLS = len(EDGES) + 1
#: The lead assumed for a candidate without a second, in nats.
ALONE = 2.0
#: Number of ranks told apart; the last stands for all further ranks.
RANKS = 16
#: Weight of the prior, in observations.
PRIOR_WEIGHT = 6.0
#: A cell with more observations halves its counts before it adds another, so that recent jobs
#: outweigh old ones.
REMEMBERED = 400
#: Upper bound of a rate: a rate of 1 has log 0, and every descendant would score like its ancestor.
MOST = 0.98

_TOP = math.log(MOST)


@dataclass(slots=True)
class _Cell:
    tries: float
    hits: float
    value: float = 0.0  # log of hits / tries, clamped

    def __post_init__(self) -> None:
        self.value = math.log(min(MOST, max(1e-4, self.hits / self.tries)))


class Calibration:
    """Acceptance rates of one or more jobs' candidates; ``coupled``: the drafters see the target's
    noise.
    """

    def __init__(self, coupled: bool) -> None:
        self._coupled = coupled
        self._cells: dict[int, _Cell] = {}

    def expansion(
        self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()
    ) -> Expansion:
        """The candidates with calibrated values, best first; ``values`` are the drafter's own."""
        cells = _cells(values, sources, coupled=self._coupled)
        known = self._cells
        rates = [known[cell].value if cell in known else self._unknown(cell) for cell in cells]
        return _best_first(rates, tokens, cells)

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
        """The acceptance rate assumed for a cell without observations.

        For the best candidate it rises with its lead; for the others it falls with their gap.
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
    """Corrections of log-probabilities, for drafters that do not see the target's noise.

    A cell sums its candidates' probabilities and counts how many of them were accepted; a value is
    corrected by the ratio. Small models underestimate the acceptance of their best candidate and
    overestimate that of the others.
    """

    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, float]] = {}  # expected hits, hits
        self._scales: dict[int, float] = {}  # log(hits / expected hits)

    def expansion(
        self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()
    ) -> Expansion:
        """The candidates with corrected values, best first; ``values`` are the drafter's own."""
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
            expected, hits = self._cells.get(cell, (0.0, 0.0))
            share = 0.5 if expected + hits > REMEMBERED else 1.0
            expected = share * expected + math.exp(value)
            hits = share * hits + (candidate == token)
            self._cells[cell] = (expected, hits)
            self._scales[cell] = math.log((hits + 1) / (expected + 1))


class Calibrations:
    """A pipeline's tables: coupled, sampled and greedy jobs have different acceptance rates."""

    def __init__(self) -> None:
        self._tables: dict[tuple[bool, bool, bool], Calibration | Scaling] = {}

    def table(self, *, coupled: bool, sampled: bool, scaled: bool) -> Calibration | Scaling:
        """The table of jobs with a temperature (``sampled``), or of those among them whose drafter
        sees the target's noise (``coupled``).

        ``scaled``: all uncoupled candidates are corrected, not only those of merged drafters.
        """
        scaled = scaled and not coupled
        key = (coupled, sampled, scaled)
        if key not in self._tables:
            self._tables[key] = Scaling() if scaled else Calibration(coupled)
        return self._tables[key]


def _cells(values: Sequence[float], sources: Sequence[int], *, coupled: bool = False) -> list[int]:
    """The cell number of every candidate: by its source, its rank there and its gap in nats."""
    if sources and min(sources) != max(sources):
        return _cells_of_several(values, sources, coupled)
    found: list[int] = []
    least = (sources[0] if sources else 0) * RANKS * CELLS
    first = least
    last = least + (RANKS - 1) * CELLS
    if coupled and values:
        if values[0] < 0:  # the source's best (value 0) was credited to another source
            first += CELLS
        else:
            found = [least + bisect_left(EDGES, _lead(values))]
            first = first + CELLS
            values = values[1:]
    firsts = chain(range(first, last, CELLS), repeat(last))
    found += [
        first + bisect_left(EDGES, -value) for first, value in zip(firsts, values, strict=False)
    ]
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
    values: list[float], tokens: Sequence[int], cells: list[int], raw: Sequence[float] = ()
) -> Expansion:
    """The candidates by descending ``values``; candidates of equal value keep their order."""
    if len(values) < 2:
        return Expansion(tuple(tokens), tuple(values), tuple(cells), tuple(raw))
    pick = operator.itemgetter(*sorted(range(len(values)), key=values.__getitem__, reverse=True))
    return Expansion(pick(tokens), pick(values), pick(cells), pick(raw) if raw else ())


def _lead(values: Sequence[float]) -> float:
    """The best candidate's distance to the second, nats; ``ALONE`` if there is no second."""
    return values[0] - values[1] if len(values) > 1 else ALONE
