"""What the beam-tree strategies share: parameters, growths that end in segments, one way to read
options.

A new strategy is a file beside this one and a line in the registry. It answers ``grow`` and
whatever else of ``core.strategy`` is special about it; most need no more than a growth and the
segments it ends in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from flowspec.core.drafting.beam_growth import BeamGrowth
from flowspec.core.job.pacing import Lockstep
from flowspec.core.job.strategy import Strategy
from flowspec.core.run.limits import TREE_ROWS
from flowspec.core.tree.segments import cut
from flowspec.core.tree.tree import Tree
from flowspec.errors import ConfigError

P = TypeVar("P", bound="BeamParams")
D = TypeVar("D")

#: How an option asks the strategy to choose, and what marks the fields of those that can.
_AUTO = "auto"
#: As many characters of a wrong value are shown.
_SHOWN = 60


def or_auto(default: int) -> int:
    """``default`` of a whole-number option that may also be ``auto``, which is 0: the strategy
    chooses.
    """
    return dataclasses.field(default=default, metadata={_AUTO: True})


def check(params: object, *ranges: tuple[str, int, int]) -> None:
    """ConfigError unless each named value of ``params`` lies in its range, ends included."""
    for name, low, high in ranges:
        value = getattr(params, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {str(value)[:_SHOWN]}; expected {low} to {high}")


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A drafted tree: ``width`` children and beam (k), ``loops`` layers after the first (d0),
    ``nodes`` kept, root excluded (L), ``segment`` rows at most per segment (L_max).

    ``order``: of the nodes in their segments, by falling ``score`` or in order of
    ``generation``. ``coupled``: at a temperature, draft with the target's noise. ``lockstep``:
    the papers' barrier.
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
            raise ConfigError(f"order is {self.order!r}; expected score or generation")

    @property
    def by_score(self) -> bool:
        return self.order == "score"


class Grown:
    """A beam growth and what to send of it: ``finish`` names the segments."""

    def __init__(self, base: BeamGrowth, finish: Callable[[Tree], list[list[int]]]) -> None:
        self._base = base
        self._finish = finish

    def pending(self, tree: Tree) -> tuple[int, ...]:
        return self._base.pending(tree)

    def segments(self, tree: Tree) -> list[list[int]]:
        return self._finish(tree)

    def rebase(self, tree: Tree) -> None:
        self._base.rebase(tree)


class BeamStrategy(Strategy, Generic[P]):
    """Common ground: one parameter object, N + 1 segments in flight, judging whatever has come
    back.
    """

    Params: ClassVar[type[BeamParams]]
    source: ClassVar[str]

    def __init__(self, params: P, stages: int) -> None:
        super().__init__()
        self.params = params
        self.stages = stages
        self.capacity = stages + 1
        self.width = params.width
        self.coupled = params.coupled
        if params.lockstep:
            self.pace = Lockstep(stages)
        self.base: BeamGrowth | None = None

    def seed(self, tree: Tree) -> Grown:
        """The round's tree, cut into N + 1 segments; keeps its beam as ``self.base``."""
        shape = self.params
        base = self.base = BeamGrowth(tree, shape.width, shape.loops)

        def finish(tree: Tree) -> list[list[int]]:
            nodes = [tree.root, *base.best(tree, shape.nodes, by_score=shape.by_score)]
            return cut(nodes, self.stages + 1, shape.segment)

        return Grown(base, finish)


def read_params(kind: type[D], options: Mapping[str, str]) -> D:
    """Parameters of dataclass ``kind`` from texts; ConfigError lists the names there are."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    for name, text in options.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise ConfigError(f"unknown strategy option {_shown(name)}; the options are: {known}")
        values[name] = _parse(fields[name], text)
    return kind(**values)


def default_text(field: dataclasses.Field[Any]) -> str:
    """A field's default as an option is written; ``read_params`` makes the default of it again."""
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
            return int(text)
        except ValueError:
            expected = f"a whole number or {_AUTO}" if automatic else "a whole number"
            raise ConfigError(
                f"strategy option {name} is {_shown(text)}; expected {expected}"
            ) from None
    return text


def _shown(text: str) -> str:
    """``text`` as an error shows it: quoted, and no longer than a line takes."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
