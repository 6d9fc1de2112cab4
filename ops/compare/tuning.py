"""Tuning: for every cell of a comparison the best options of its strategy, on prompts of their own.

A cell's search (``search``) evaluates configurations on a few prompts; the best of them and the
default then run all prompts, and the fastest is taken. A configuration's cost is its mean time per
token over all tokens after each prompt's first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.grid import Case, Cell, Grid, Tell
from flowspec.rehearse.compare.simulate import Ran
from flowspec.strategies import build
from ops.compare.search import Space, search

#: A configuration slower than the best so far by this factor on the first prompt runs no others.
ABANDONED = 1.3


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is searched per cell: at most ``configurations``, on ``few`` prompts; then the best
    ``finalists`` and the default on all prompts.
    """

    configurations: int = 40
    few: int = 3
    finalists: int = 4


@dataclass(frozen=True, slots=True)
class Tuned:
    """A cell whose strategy is the text that was given, and what was found for it.

    ``strategy``: the best text. ``configurations``: the number evaluated. ``finalists``: seconds
    per token over all prompts by text, the default's among them.
    """

    cell: Cell
    strategy: str
    configurations: int
    finalists: Mapping[str, float]

    @property
    def measured(self) -> Cell:
        """The cell with the strategy that was found."""
        return replace(self.cell, strategy=self.strategy)


class Tuner:
    """Searches over the prompts of ``grid``.

    ``keeps_drafts``: remember all drafts, for a later search over the same texts and drafters.
    """

    def __init__(
        self,
        grid: Grid,
        effort: Effort | None = None,
        tell: Tell = lambda what, done, of: None,
        *,
        keeps_drafts: bool = False,
    ) -> None:
        self.grid = grid
        self.keeps_drafts = keeps_drafts
        self.effort = effort or Effort()
        self._tell = tell

    def run(self, cells: Mapping[Cell, str]) -> list[Tuned]:
        """What was found for each of ``cells``, given with their draft sources."""
        self.grid.check_cases()
        found: list[Tuned] = []
        # Cells with the same texts and drafters follow each other: their drafts are remembered.
        alike = sorted(cells, key=lambda cell: (cells[cell], cell.temperature))
        for _, group in groupby(alike, key=lambda cell: (cells[cell], cell.temperature)):
            for cell in group:
                self._tell(f"tuning {cell.strategy} with {cells[cell]}", len(found), len(cells))
                found.append(self._tune(cell, cells[cell]))
            if not self.keeps_drafts:
                self.grid.forget_drafts()
        return found

    def _tune(self, cell: Cell, source: str) -> Tuned:
        cases = self.grid.cases_at(cell.temperature)
        space = Space.of(cell.strategy)
        costs = search(space, self._screen(cell, source, cases), self.effort.configurations)
        default = space.text(space.starts[0])
        best = [text for text, cost in costs.items() if cost < math.inf]
        final = dict.fromkeys((*best[: self.effort.finalists], default))
        finalists = {text: self._over_all(replace(cell, strategy=text), source) for text in final}
        return Tuned(cell, min(finalists, key=finalists.__getitem__), len(costs), finalists)

    def _screen(self, cell: Cell, source: str, cases: Sequence[Case]) -> Callable[[str], float]:
        """The cost of a strategy's text on a few of ``cases``, begun as the grid begins."""
        few = _spread(cases, self.effort.few)
        least = math.inf  # of any configuration on the first prompt

        def cost(text: str) -> float:
            nonlocal least
            try:
                build(text, cell.stages)
            except ConfigError:  # values that exclude each other
                return math.inf
            place = replace(cell, strategy=text)
            history = self.grid.warmed(place, source, few[0])
            runs = [self.grid.simulate(few[0], place, source, history)]
            first = seconds_per_token(runs)
            least = min(least, first)
            if first > ABANDONED * least:
                return math.inf
            runs += [self.grid.simulate(case, place, source, history) for case in few[1:]]
            return seconds_per_token(runs)

        return cost

    def _over_all(self, cell: Cell, source: str) -> float:
        """The cost over all prompts, measured as the grid measures."""
        cases = self.grid.cases_at(cell.temperature)
        history = self.grid.warmed(cell, source, cases[0])
        return seconds_per_token(self.grid.simulate(case, cell, source, history) for case in cases)


def seconds_per_token(runs: Iterable[Ran]) -> float:
    """Mean time of all tokens after each run's first; infinite if there are none."""
    stats = [ran.stats for ran in runs]
    tokens = sum(one["tokens"] - 1 for one in stats)
    return sum(one["decode_seconds"] for one in stats) / tokens if tokens else math.inf


def _spread(cases: Sequence[Case], count: int) -> list[Case]:
    """``count`` of ``cases`` at equal distances: neighbours are often of one set."""
    count = min(count, len(cases))
    return [cases[at * len(cases) // count] for at in range(count)]
