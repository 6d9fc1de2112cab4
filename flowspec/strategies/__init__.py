"""The systems, by name. A strategy is one file here and one line in ``STRATEGIES``."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from flowspec.core.strategy import Strategy
from flowspec.errors import ConfigError
from flowspec.strategies.autoregressive import Autoregressive
from flowspec.strategies.base import read_params
from flowspec.strategies.flowspec import FlowSpec
from flowspec.strategies.naive_pp import NaivePP
from flowspec.strategies.pruned_pp import PrunedPP


class StrategyClass(Protocol):
    """A registered strategy: parameters, where it comes from, and how to make one for a job."""

    Params: type[Any]
    source: str

    def __call__(self, params: Any, stages: int) -> Strategy: ...


STRATEGIES: dict[str, StrategyClass] = {
    "autoregressive": Autoregressive,
    "naive_pp": NaivePP,
    "pruned_pp": PrunedPP,
    "flowspec": FlowSpec,
}


def build(text: str, stages: int) -> Strategy:
    """The strategy ``NAME`` or ``NAME:option=value,option=value`` for a pipeline of ``stages``."""
    name, _, rest = text.partition(":")
    kind = STRATEGIES.get(name)
    if kind is None:
        raise ConfigError(f"unknown strategy {name!r}; there are: {', '.join(STRATEGIES)}")
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"strategy option {item!r} has no value; write option=value")
        options[key.strip()] = value.strip()
    return kind(read_params(kind.Params, options), stages)


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """A strategy as a list shows it; ``options`` are name and default."""

    name: str
    summary: str
    source: str
    options: tuple[tuple[str, str], ...]


def describe() -> list[Description]:
    """Every strategy with one line, its source, its options and their defaults."""
    return [
        Description(
            name,
            (kind.__doc__ or "").strip().splitlines()[0],
            kind.source,
            tuple((field.name, _show(field.default)) for field in dataclasses.fields(kind.Params)),
        )
        for name, kind in STRATEGIES.items()
    ]


def _show(default: object) -> str:
    return {True: "on", False: "off"}.get(default, str(default)) if isinstance(default, bool) else str(default)
