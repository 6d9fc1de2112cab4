"""The systems, by name. A strategy is one file here and one line in ``STRATEGIES``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from flowspec.core.session.strategy import Strategy
from flowspec.errors import ConfigError
from flowspec.strategies.auto.strategy import Auto
from flowspec.strategies.autoregressive import Autoregressive
from flowspec.strategies.base import default_text, read_params
from flowspec.strategies.chain import Chain
from flowspec.strategies.flowspec import FlowSpec
from flowspec.strategies.naive_pp import NaivePP
from flowspec.strategies.pipedec import PipeDec, PipeDecHead
from flowspec.strategies.pipespec import PipeSpec
from flowspec.strategies.pruned_pp import PrunedPP
from flowspec.strategies.specpipe import SpecPipe, SpecPipeDB
from flowspec.strategies.specpipe_lossy import LossyNucleus, LossyRelaxed
from flowspec.strategies.speculative import Speculative
from flowspec.strategies.static_tree import StaticTree


class StrategyClass(Protocol):
    """A registered strategy: parameters, where it comes from, and how to make one for a job."""

    Params: type[Any]
    source: str
    lossy: str
    search: Mapping[str, tuple[str, ...]]
    starts: tuple[str, ...]

    def __call__(self, params: Any, stages: int) -> Strategy: ...


STRATEGIES: dict[str, StrategyClass] = {
    "autoregressive": Autoregressive,
    "naive_pp": NaivePP,
    "pruned_pp": PrunedPP,
    "flowspec": FlowSpec,
    "pipedec": PipeDec,
    "pipedec_head": PipeDecHead,
    "specpipe": SpecPipe,
    "specpipe_db": SpecPipeDB,
    "specpipe_lossy_relaxed": LossyRelaxed,
    "specpipe_lossy_nucleus": LossyNucleus,
    "pipespec": PipeSpec,
    "speculative": Speculative,
    "static_tree": StaticTree,
    "chain": Chain,
    "auto": Auto,
}


#: Strategies whose text is the target's own, token for token.
EXACT = tuple(name for name, kind in STRATEGIES.items() if not kind.lossy)


def build(text: str, stages: int) -> Strategy:
    """The strategy ``NAME`` or ``NAME:option=value,option=value`` for a pipeline of ``stages``."""
    name, options = parse(text)
    kind = STRATEGIES[name]
    return kind(read_params(kind.Params, options), stages)


def parse(text: str) -> tuple[str, dict[str, str]]:
    """The name in a strategy's text and its options, unread; ConfigError for an unknown name."""
    name, colon, rest = text.partition(":")
    if name not in STRATEGIES:
        raise ConfigError(f"unknown strategy {name!r}; there are: {', '.join(STRATEGIES)}")
    if colon and not rest.strip(","):
        raise ConfigError(f"strategy {text!r} ends without an option; write {name}:option=value")
    options: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"strategy option {item!r} has no value; write option=value")
        option = key.strip()
        if option in options:
            raise ConfigError(f"strategy option {option} is given twice; give it once")
        options[option] = value.strip()
    return name, options


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """A strategy as a list shows it; ``options`` are name and default.

    ``runs_alone``: no other job is under way while one of it is.
    """

    name: str
    summary: str
    source: str
    options: tuple[tuple[str, str], ...]
    runs_alone: bool


def runs_alone(strategy: str) -> bool:
    """Whether jobs with ``strategy``, as in ``build``, wait for all others, and others for them."""
    return build(strategy, 1).pacing.has_barrier


def describe() -> list[Description]:
    """Every strategy with one line, its source, its options and their defaults."""
    return [
        Description(
            name,
            (kind.__doc__ or "").strip().splitlines()[0],
            kind.source,
            tuple((field.name, default_text(field)) for field in dataclasses.fields(kind.Params)),
            runs_alone(name),
        )
        for name, kind in STRATEGIES.items()
    ]
