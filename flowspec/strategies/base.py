"""What the beam-tree strategies share: parameters, a growth that ends in segments, and the parsing
of strategy options.

A new strategy is a file beside this one and a line in the registry. It overrides the methods of
``core.session.strategy.Strategy`` in which it differs; most need only ``grow``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from flowspec.core.drafting.beam_growth import BeamGrowth, BeamSearch
from flowspec.core.run.limits import TREE_ROWS
from flowspec.core.session.pacing import Lockstep
from flowspec.core.session.strategy import Strategy, View
from flowspec.core.tree.segments import cut
from flowspec.core.tree.tree import Tree
from flowspec.errors import ConfigError

P = TypeVar("P", bound="BeamParams")
D = TypeVar("D")

#: The option value that lets the strategy choose; also the metadata key of fields that accept it.
_AUTO = "auto"
#: Characters of a wrong value that an error message shows.
_SHOWN = 60


def or_auto(default: int) -> int:
    """A whole-number option that also accepts ``auto``, stored as 0: the strategy chooses."""
    return dataclasses.field(default=default, metadata={_AUTO: True})


def check(params: object, *ranges: tuple[str, int, int]) -> None:
    """ConfigError unless each named value of ``params`` is within its inclusive range."""
    for name, low, high in ranges:
        value = getattr(params, name)
        if not low <= value <= high:
            raise ConfigError(
                f"strategy option {name} is {str(value)[:_SHOWN]}; expected {low} to {high}"
            )


def least_score(confidence: int) -> float:
    """The score of a path of probability ``confidence`` percent; of 0 percent: below every path."""
    return math.log(confidence / 100) if confidence else -math.inf


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A drafted tree: ``width`` children and beam (k), ``loops`` layers after the first (d0),
    ``nodes`` kept, root excluded (L), cut into N + 1 segments, or into more if those would have
    more than ``segment`` rows (L_max) each, the root not counted.

    ``order``: nodes enter the segments by descending ``score`` or in order of ``generation``.
    ``coupled``: at a temperature, draft with the target's noise. ``lockstep``: the papers'
    barrier.
    """

    width: int = 10
    loops: int = 6
    nodes: int = 80
    segment: int = 16
    order: str = "score"
    coupled: bool = True
    lockstep: bool = False

    def __post_init__(self) -> None:
        check(
            self,
            ("width", 1, 64),
            ("loops", 0, 32),
            ("nodes", 1, TREE_ROWS - 1),
            ("segment", 1, TREE_ROWS),
        )
        if self.order not in ("score", "generation"):
            raise ConfigError(
                f"strategy option order is {self.order!r}; expected score or generation"
            )

    @property
    def by_score(self) -> bool:
        return self.order == "score"


class BeamStrategy(Strategy, Generic[P]):
    """Base of the beam-tree strategies: N + 1 segments in flight, each judged when it returns."""

    Params: ClassVar[type[BeamParams]]
    source: ClassVar[str]
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "width": ("1", "2", "4", "6", "8", "10", "16"),
        "loops": ("1", "2", "3", "4", "6", "8", "12"),
        "nodes": ("4", "8", "16", "32", "48", "64", "80", "128"),
        "lockstep": ("off", "on"),
    }
    starts: ClassVar[tuple[str, ...]] = (
        "width=1,loops=3,nodes=4",
        "width=4,loops=3,nodes=16",
        "width=8,loops=4,nodes=48",
    )

    def __init__(self, params: P, stages: int) -> None:
        super().__init__()
        self.params = params
        self.stages = stages
        self.max_in_flight = stages + 1
        self.draft_width = params.width
        self.coupled = params.coupled
        if params.lockstep:
            self.pacing = Lockstep(stages)
        self.base: BeamSearch | None = None

    def seed(self, view: View) -> BeamGrowth:
        """The round's tree, cut into N + 1 segments; keeps the beam as ``self.base``.

        With few rows in a segment, the tree has no more nodes than N + 1 segments have rows.
        """
        tree = view.tree
        shape = self.params
        size = view.at_most(shape.segment)
        kept = min(shape.nodes, view.at_most(shape.nodes) * (self.stages + 1))
        base = self.base = BeamSearch(tree, shape.width, shape.loops)

        def finish(tree: Tree) -> list[list[int]]:
            nodes = [tree.root, *base.best(tree, kept, by_score=shape.by_score)]
            return cut(nodes, self.stages + 1, size)

        return BeamGrowth(base, finish)


def read_params(kind: type[D], options: Mapping[str, str]) -> D:
    """An instance of dataclass ``kind`` from option texts; ConfigError lists the known names."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for name, text in options.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"unknown strategy option {_shown(name)}; the options are: {known}")
        values[name] = _parse(fields[name], text)
    return kind(**values)


def default_text(field: dataclasses.Field[Any]) -> str:
    """A field's default as option text; ``read_params`` parses it back to the default."""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return _AUTO if field.default == 0 and _AUTO in field.metadata else str(field.default)


def _parse(field: dataclasses.Field[Any], text: str) -> object:
    name = field.name
    default = field.default
    if isinstance(default, bool):
        if text.lower() not in ("on", "off", "1", "0", "true", "false"):
            raise ConfigError(f"strategy option {name} is {_shown(text)}; expected on or off")
        return text.lower() in ("on", "1", "true")
    if isinstance(default, int):
        automatic = _AUTO in field.metadata
        if automatic and text.lower() == _AUTO:
            return 0
        try:
            number = int(text)
            if automatic and not number:  # 0 stands for auto in the dataclass, not in a text
                raise ValueError(text)
            return number
        except ValueError:
            expected = f"a whole number above 0 or {_AUTO}" if automatic else "a whole number"
            raise ConfigError(
                f"strategy option {name} is {_shown(text)}; expected {expected}"
            ) from None
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(
                f"strategy option {name} is {_shown(text)}; expected a number"
            ) from None
    return text


def _shown(text: str) -> str:
    """``text`` for an error message: quoted and shortened."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
