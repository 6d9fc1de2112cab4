"""The split is optimal: against every order of every choice of boxes and every cut."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from flowspec.errors import ConfigError
from flowspec.plan.split import BoxKind, Split, SplitSearch


@dataclass(frozen=True)
class Case:
    """A random cluster: seconds and bytes of every layer, boxes with speed and memory."""

    seconds: tuple[float, ...]
    sizes: tuple[int, ...]
    speeds: tuple[float, ...]
    memories: tuple[float, ...]
    first: float
    last: float
    each: float = 0.0

    def cost(self, box: int, layers: range) -> float:
        if not self.fits(box, layers):
            return math.inf
        extra = self.first * (layers.start == 0) + self.last * (layers.stop == len(self.sizes))
        extra += self.each
        return (sum(self.seconds[layer] for layer in layers) + extra) / self.speeds[box]

    @property
    def kinds(self) -> list[BoxKind]:
        """Every box as a kind of its own."""
        return [
            BoxKind(
                1,
                tuple(seconds / self.speeds[box] for seconds in self.seconds),
                self.first / self.speeds[box],
                self.last / self.speeds[box],
                partial(self.fits, box),
                self.each / self.speeds[box],
            )
            for box in range(len(self.speeds))
        ]

    def fits(self, box: int, layers: range) -> bool:
        return sum(self.sizes[layer] for layer in layers) <= self.memories[box]

    def every_split(self, boxes: int) -> Iterator[tuple[tuple[int, ...], list[range], list[float]]]:
        count = len(self.sizes)
        for order in itertools.permutations(range(len(self.speeds)), boxes):
            for cuts in itertools.combinations(range(1, count), boxes - 1):
                bounds = (0, *cuts, count)
                ranges = [range(*pair) for pair in itertools.pairwise(bounds)]
                costs = [self.cost(box, part) for box, part in zip(order, ranges, strict=True)]
                if max(costs) < math.inf:
                    yield order, ranges, costs


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    layers = draw.randint(4, 9)
    boxes = draw.randint(2, 4)
    sizes = tuple(draw.randint(1, 9) for _ in range(layers))
    return Case(
        tuple(draw.choice((1.0, 2.0, draw.uniform(0.5, 4))) for _ in range(layers)),
        sizes,
        tuple(draw.choice((1.0, 2.0, draw.uniform(0.3, 5))) for _ in range(boxes)),
        tuple(draw.uniform(0.2, 1.2) * sum(sizes) for _ in range(boxes)),
        draw.uniform(0, 2),
        draw.uniform(0, 6),
        draw.choice((0.0, draw.uniform(0, 3))),
    )


def check(split: Split, case: Case) -> None:
    """The split is possible and its seconds are those of its stages."""
    assert len(set(split.kinds)) == len(split.kinds)
    assert [layer for layers in split.layers for layer in layers] == list(range(len(case.sizes)))
    assert all(split.layers)
    costs = [case.cost(box, part) for box, part in zip(split.kinds, split.layers, strict=True)]
    assert list(split.seconds) == pytest.approx(costs)
    assert max(costs) < math.inf


@pytest.mark.parametrize("seed", range(20))
def test_the_split_is_optimal_on_a_random_cluster(seed: int) -> None:
    case = random_case(seed)
    search = SplitSearch(case.kinds)
    for boxes in range(1, len(case.speeds) + 1):
        every = [costs for _, _, costs in case.every_split(boxes)]
        for found, key in (
            (search.fastest_stages().get(boxes), lambda costs: (max(costs), sum(costs))),
            (search.least_sum().get(boxes), lambda costs: (sum(costs), max(costs))),
        ):
            if not every:
                assert found is None
                continue
            assert found is not None
            check(found, case)
            least = min(key(costs)[0] for costs in every)
            ties = [key(costs)[1] for costs in every if key(costs)[0] <= least * (1 + 1e-9)]
            first, second = key(list(found.seconds))
            assert first == pytest.approx(least, rel=1e-6)
            assert second <= min(ties) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_sum_heeds_a_bound_on_every_stage(seed: int) -> None:
    case = random_case(seed)
    search = SplitSearch(case.kinds)
    for boxes, fastest in search.fastest_stages().items():
        bound = fastest.slowest * random.Random(seed).uniform(1.001, 2)
        every = [costs for _, _, costs in case.every_split(boxes) if max(costs) <= bound]
        found = search.least_sum(bound)[boxes]
        check(found, case)
        assert found.slowest <= bound * (1 + 1e-6)
        assert found.total == pytest.approx(min(map(sum, every)), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_equal_boxes_under_one_kind_change_nothing(seed: int) -> None:
    case = random_case(seed)
    doubled = Case(
        case.seconds,
        case.sizes,
        case.speeds[:2] * 2,
        case.memories[:2] * 2,
        case.first,
        case.last,
        case.each,
    )
    apart = SplitSearch(doubled.kinds)
    together = SplitSearch([replace(kind, count=2) for kind in doubled.kinds[:2]])
    for alone, joint in (
        (apart.fastest_stages(), together.fastest_stages()),
        (apart.least_sum(), together.least_sum()),
    ):
        assert alone.keys() == joint.keys()
        for boxes, one in alone.items():
            other = joint[boxes]
            assert (other.slowest, other.total) == pytest.approx((one.slowest, one.total))


def equal_boxes(layers: int, count: int, most: int) -> BoxKind:
    return BoxKind(count, (1.0,) * layers, 0.0, 0.0, lambda stage: len(stage) <= most)


def test_sixteen_equal_boxes_are_searched() -> None:
    search = SplitSearch([equal_boxes(80, 16, 80)])
    assert search.fastest_stages()[16].slowest == 5.0


def test_a_tie_of_sums_goes_to_the_fastest_slowest_stage() -> None:
    search = SplitSearch([equal_boxes(12, 4, 12)])
    assert [len(layers) for layers in search.least_sum()[4].layers] == [3, 3, 3, 3]


def test_nothing_is_found_where_nothing_fits() -> None:
    search = SplitSearch([equal_boxes(4, 2, 1)])
    assert search.fastest_stages() == search.least_sum() == {}


def test_too_many_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="give equal boxes one name and a count"):
        SplitSearch([equal_boxes(4, 1, 4)] * 13)
