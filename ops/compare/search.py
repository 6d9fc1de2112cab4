"""A search over a strategy's options: cheap, deterministic, from several starting points.

``search`` evaluates the starting points, climbs from the best of them one option at a time to
neighbouring values, as long as that gains anything, and returns the best configurations it saw.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flowspec.strategies import STRATEGIES, parse
from flowspec.strategies.base import default_text

#: Starting points from which the search climbs.
CLIMBS = 2
#: Least relative gain of a step.
LEAST_GAIN = 0.002

#: A value of every searched option.
Configuration = Mapping[str, str]
Cost = Callable[[str], float]
"""What a strategy's text costs; infinite if it is not allowed."""


@dataclass(frozen=True)
class Space:
    """The options of a strategy that may vary: ``values`` by option, ``starts`` to begin from.

    ``name`` and the options ``fixed`` are those of the strategy's text. The first start holds the
    defaults.
    """

    name: str
    fixed: Mapping[str, str]
    values: Mapping[str, tuple[str, ...]]
    starts: tuple[Configuration, ...]

    @classmethod
    def of(cls, text: str) -> Space:
        """The space of a strategy's text; options named in it keep the value they have there."""
        name, fixed = parse(text)
        kind = STRATEGIES[name]
        values = {option: tried for option, tried in kind.search.items() if option not in fixed}
        defaults = {
            field.name: default_text(field)
            for field in dataclasses.fields(kind.Params)
            if field.name in values
        }
        starts = [defaults]
        for start in kind.starts:
            _, given = parse(f"{name}:{start}")
            starts.append(
                {**defaults, **{key: value for key, value in given.items() if key in values}}
            )
        return cls(name, fixed, values, tuple(starts))

    def text(self, configuration: Configuration) -> str:
        """The strategy's text with ``configuration``, without values that are the defaults."""
        defaults = self.starts[0]
        said = {
            **self.fixed,
            **{key: value for key, value in configuration.items() if value != defaults[key]},
        }
        options = ",".join(f"{key}={value}" for key, value in said.items())
        return f"{self.name}:{options}" if options else self.name

    def neighbour(self, configuration: Configuration, option: str, step: int) -> Configuration:
        """``configuration`` with the next value of ``option`` in direction ``step``, if any."""
        values = self.values[option]
        at = values.index(configuration[option]) + step
        return {**configuration, option: values[at]} if 0 <= at < len(values) else configuration


def search(space: Space, cost: Cost, most: int) -> dict[str, float]:
    """The texts evaluated, at most ``most``, and their costs; the cheapest first."""
    known: dict[str, float] = {}

    def priced(configuration: Configuration) -> float:
        text = space.text(configuration)
        if text not in known and len(known) < most:
            known[text] = cost(text)
        return known.get(text, math.inf)

    # Several starts may be the same text if options are fixed.
    starts = {space.text(start): start for start in space.starts}
    best = sorted(starts.values(), key=priced)
    for start in best[:CLIMBS]:
        _climb(space, start, priced)
    return dict(sorted(known.items(), key=lambda item: item[1]))


def _climb(space: Space, start: Configuration, priced: Callable[[Configuration], float]) -> None:
    best = start
    while True:
        before = best
        for option in space.values:
            for step in (1, -1):
                best = _walk(space, best, option, step, priced)
        if best == before:
            return


def _walk(
    space: Space,
    best: Configuration,
    option: str,
    step: int,
    priced: Callable[[Configuration], float],
) -> Configuration:
    """Move ``option`` in one direction as long as that gains."""
    while True:
        other = space.neighbour(best, option, step)
        if not priced(other) < (1 - LEAST_GAIN) * priced(best):
            return best
        best = other
