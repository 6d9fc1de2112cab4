"""The exact split of a model's layers over boxes: which boxes, in which order, which layers each.

A stage is a contiguous range of at least one layer on one box whose memory suffices. For every
number of stages two splits are found: the one whose slowest stage is fastest (ties: least sum), and
the one with the least sum of stage times (ties: fastest slowest stage). Boxes of one kind are
interchangeable, so a state of the search is how many boxes of each kind are used, and a split is a
shortest path over layers. Nothing is approximated but the seconds of a layer, which are rounded to
a power of two below a billionth of the slowest pass, so that equal sums are equal in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from flowspec.errors import ConfigError

#: Most states of a search: 12 boxes that all differ, or any number of a few kinds.
MOST_STATES = 4096
#: No split costs more than ``_WHOLE`` units and a little rounding, an impossible stage ``_NEVER``;
#: two of these still fit above a slowest stage in one 64-bit key.
_WHOLE = 1 << 29
_NEVER = 1 << 30
_SHIFT = 31
_IMPOSSIBLE = (_NEVER << _SHIFT) | _NEVER

Units = npt.NDArray[np.int64]
State = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxKind:
    """``count`` boxes that are alike: seconds of each layer, before the first, after the last.

    ``fits``: whether the memory suffices for a stage with these layers. ``each``: seconds of any
    stage beside its layers.
    """

    count: int
    layers: tuple[float, ...]
    first: float
    last: float
    fits: Callable[[range], bool]
    each: float = 0.0

    def stage_seconds(self, layers: range) -> float:
        """Seconds of a pass of the stage with ``layers``."""
        ends = self.first * (layers.start == 0) + self.last * (layers.stop == len(self.layers))
        return math.fsum(self.layers[layers.start : layers.stop]) + ends + self.each


@dataclass(frozen=True, slots=True)
class Split:
    """One stage after the other: the kind of its box, its layers and the seconds of a pass."""

    kinds: tuple[int, ...]
    layers: tuple[range, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.seconds)

    @property
    def total(self) -> float:
        """Seconds of one pass through all stages."""
        return math.fsum(self.seconds)


class SplitSearch:
    """The best splits over the boxes of ``kinds``, whose layers are those of one model.

    ConfigError for boxes that can be combined in more than ``MOST_STATES`` ways.
    """

    def __init__(self, kinds: Sequence[BoxKind]) -> None:
        self._kinds = tuple(kinds)
        self._layers = len(kinds[0].layers)
        self._counts = tuple(kind.count for kind in kinds)
        states = math.prod(count + 1 for count in self._counts)
        if states > MOST_STATES:
            raise ConfigError(
                f"{sum(self._counts)} boxes of {len(kinds)} kinds can be combined in {states} "
                f"ways; at most {MOST_STATES} are searched: give equal boxes one name and a count"
            )
        ends = max(kind.first for kind in kinds) + max(kind.last for kind in kinds)
        every = sum(self._counts) * max(kind.each for kind in kinds)
        layers = map(max, zip(*(kind.layers for kind in kinds), strict=True))
        slowest = math.fsum(layers) + ends + every
        self._unit = 2.0 ** math.ceil(math.log2(slowest / _WHOLE))
        self._costs = [self._table(kind) for kind in kinds]

    def _table(self, kind: BoxKind) -> Units:
        """Units of the stage from layer ``row`` up to ``column``."""
        size = self._layers + 1
        found = np.full((size, size), _NEVER, np.int64)
        first, last, each = (round(one / self._unit) for one in (kind.first, kind.last, kind.each))
        sums = list(accumulate((round(one / self._unit) for one in kind.layers), initial=0))
        for start, stop in itertools.combinations(range(size), 2):
            if kind.fits(range(start, stop)):
                ends = first * (start == 0) + last * (stop == self._layers)
                found[start, stop] = sums[stop] - sums[start] + ends + each
        return found

    def fastest_stages(self) -> dict[int, Split]:
        """By number of stages, the split whose slowest stage is fastest; those that fit."""
        slowest: dict[int, int] = {}
        for state, costs in self._by_slowest().items():
            count = sum(state)
            slowest[count] = min(slowest.get(count, _NEVER), int(costs[self._layers]))
        return {
            count: self._split(count, self._by_sum(count, bound), bound)
            for count, bound in sorted(slowest.items())
            if count > 0 and bound < _NEVER
        }

    def least_sum(self, slowest: float = math.inf) -> dict[int, Split]:
        """By number of stages, the split with the least sum of stage times; those that fit.

        ``slowest``: no stage takes longer, seconds.
        """
        bound = math.floor(min(_NEVER - 1, slowest / self._unit))
        best = self._by_sum(sum(self._counts), bound)
        counts = sorted({sum(state) for state in best if best[state][self._layers] < _IMPOSSIBLE})
        return {count: self._split(count, best, bound) for count in counts if count}

    def _split(self, stages: int, best: dict[State, Units], bound: int) -> Split:
        """The best split over ``stages`` stages, none of which costs more than ``bound``."""
        state = min(
            (state for state in best if sum(state) == stages),
            key=lambda state: int(best[state][self._layers]),
        )
        stop = self._layers
        found: list[tuple[int, range]] = []
        while stop:
            kind, start = self._last_stage(best, state, stop, bound)
            found.append((kind, range(start, stop)))
            state = _without(state, kind)
            stop = start
        found.reverse()
        return Split(
            tuple(kind for kind, _ in found),
            tuple(layers for _, layers in found),
            tuple(self._kinds[kind].stage_seconds(layers) for kind, layers in found),
        )

    def _last_stage(
        self, best: dict[State, Units], state: State, stop: int, bound: int
    ) -> tuple[int, int]:
        """Box kind and first layer of the last stage of the best split of the layers to ``stop``.

        A slowest stage that lies before it may hide others, so equal keys are as good.
        """
        options = []
        for kind in _used(state):
            column = _bounded(self._costs[kind][:, stop], bound)
            keys = _joined(best[_without(state, kind)], column)
            start = int(keys.argmin())
            options.append((int(keys[start]), kind, start))
        _, kind, start = min(options)
        return kind, start

    def _by_slowest(self) -> dict[State, Units]:
        """By boxes used, the least possible slowest stage of the first layers, in units."""
        best = self._beginning(0, _NEVER)
        for state in _states(self._counts, sum(self._counts)):
            options = [
                np.maximum(best[_without(state, kind)][:, None], self._costs[kind]).min(axis=0)
                for kind in _used(state)
            ]
            best[state] = np.minimum.reduce(options)
        return best

    def _by_sum(self, stages: int, bound: int) -> dict[State, Units]:
        """By boxes used, the least key of the first layers: the sum, and then the slowest stage.

        No stage costs more than ``bound``.
        """
        allowed = [_bounded(table, bound) for table in self._costs]
        best = self._beginning(0, _IMPOSSIBLE)
        for state in _states(self._counts, stages):
            options = [
                _joined(best[_without(state, kind)][:, None], allowed[kind]).min(axis=0)
                for kind in _used(state)
            ]
            best[state] = np.minimum(np.minimum.reduce(options), _IMPOSSIBLE)
        return best

    def _beginning(self, none: int, never: int) -> dict[State, Units]:
        start = np.full(self._layers + 1, never, np.int64)
        start[0] = none
        return {(0,) * len(self._counts): start}


def _bounded(costs: Units, bound: int) -> Units:
    return np.where(costs > bound, _NEVER, costs)


def _joined(before: Units, stage: Units) -> Units:
    """Keys of splits that end with one more stage."""
    sums = (before >> _SHIFT) + stage
    slowest = np.maximum(before & ((1 << _SHIFT) - 1), stage)
    keys: Units = (sums << _SHIFT) | slowest
    return keys


def _states(counts: Sequence[int], stages: int) -> list[State]:
    """Every choice of 1 to ``stages`` boxes, each after those it contains."""
    every = itertools.product(*(range(count + 1) for count in counts))
    return sorted((state for state in every if 0 < sum(state) <= stages), key=sum)


def _used(state: State) -> list[int]:
    return [kind for kind, count in enumerate(state) if count]


def _without(state: State, kind: int) -> State:
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])
