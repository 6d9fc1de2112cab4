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
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.tree import Expansion, Node

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

_FIRST = operator.itemgetter(0)


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

    def expansion(self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()) -> Expansion:
        """The candidates with calibrated values, best first; ``values`` are the drafter's own."""
        own: dict[int, list[float]] = {} if sources else {0: list(values)}
        for source, value in zip(sources, values, strict=False):
            own.setdefault(source, []).append(value)
        # A source whose best was credited to another one begins at its second: in a coupled draft a best has value 0.
        ranks = {source: 0 if self._coupled and theirs and theirs[0] < 0 else -1 for source, theirs in own.items()}
        entries = []
        for token, value, source in zip(tokens, values, sources or (0,) * len(tokens), strict=True):
            rank = ranks[source] = ranks[source] + 1
            gap = _lead(own[source]) if self._coupled and not rank else -value
            cell = _cell(source, rank, gap)
            entries.append((-self._value(cell), token, cell))
        entries.sort(key=_FIRST)
        losses, found, cells = zip(*entries, strict=True) if entries else ((), (), ())
        return Expansion(found, tuple([-loss for loss in losses]), cells)

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        for candidate, cell in zip(node.expansion.tokens, node.expansion.cells, strict=False):
            entry = self._cells[cell]
            share = 0.5 if entry.tries > REMEMBERED else 1.0
            self._cells[cell] = _Cell(share * entry.tries + 1, share * entry.hits + (candidate == token))

    def _value(self, number: int) -> float:
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = _Cell(PRIOR_WEIGHT, PRIOR_WEIGHT * self._prior(number))
        return cell.value

    def _prior(self, number: int) -> float:
        """Expected acceptance before anything was seen: a lead helps the first, a lag hurts the others."""
        rank, bucket = number // CELLS % RANKS, number % CELLS
        middle = (0.0, *EDGES)[bucket]
        if not self._coupled:
            return math.exp(-middle)
        if rank == 0:
            return 0.3 + 0.5 * (1 - math.exp(-middle / 2))
        return 0.25 / (rank + 1) * math.exp(-middle / 4)


class Scaling:
    """A table for drafters that give log-probabilities and do not see the noise: how far to believe them.

    A cell counts what its candidates promised and how often they were right; their values are scaled by the
    ratio. A small model is too modest where the target takes its best token, and promises too much below.
    """

    def __init__(self) -> None:
        self._cells: dict[int, tuple[float, float]] = {}  # promised, hits

    def expansion(self, tokens: Sequence[int], values: Sequence[float], sources: Sequence[int] = ()) -> Expansion:
        """The candidates with scaled values, best first; ``values`` are the drafter's own."""
        ranks: dict[int, int] = {}
        entries = []
        for token, value, source in zip(tokens, values, sources or (0,) * len(tokens), strict=True):
            rank = ranks[source] = ranks.get(source, -1) + 1
            cell = _cell(source, rank, -value)
            promised, hits = self._cells.get(cell, (0.0, 0.0))
            scaled = min(math.log(MOST), value + math.log((hits + 1) / (promised + 1)))
            entries.append((-scaled, token, cell, value))
        entries.sort(key=_FIRST)
        losses, found, cells, raw = zip(*entries, strict=True) if entries else ((), (), (), ())
        return Expansion(found, tuple([-loss for loss in losses]), cells, raw)

    def observe(self, node: Node, token: int) -> None:
        """The target chose ``token`` after ``node``."""
        if node.expansion is None:
            return
        found = node.expansion
        for candidate, cell, value in zip(found.tokens, found.cells, found.raw, strict=True):
            promised, hits = self._cells.get(cell, (0.0, 0.0))
            share = 0.5 if promised + hits > REMEMBERED else 1.0
            self._cells[cell] = (share * promised + math.exp(value), share * hits + (candidate == token))


def _cell(source: int, rank: int, gap: float) -> int:
    """The number of the cell of candidates of ``source`` at ``rank`` with so wide a ``gap``, nats."""
    return (source * RANKS + min(rank, RANKS - 1)) * CELLS + bisect_left(EDGES, gap)


def _lead(values: Sequence[float]) -> float:
    """How far a source's best is ahead of its second; of a lone candidate nobody knows: something in between."""
    return values[0] - values[1] if len(values) > 1 else ALONE
