"""Content of a paper's table, from a TOML file here: systems, clusters, figures, hit rates."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowspec.errors import ConfigError
from flowspec.testbed.hits import Kind, geometric

PLACE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A system as its authors ran it.

    ``draft``: empty: the table's. ``middles``: number of middle models. ``paper``: its published
    figure; None: there is none.
    """

    system: str
    strategy: str
    paper: float | None = None
    draft: str = ""
    middles: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Systems compared on one cluster at one temperature, at the hit rates of ``oracles``."""

    name: str
    profile: str
    stages: int
    temperature: float
    oracles: tuple[str, ...]
    rows: tuple[PaperRow, ...]


@dataclass(frozen=True, slots=True)
class Oracle:
    """A paper's hit rates: the kinds of positions for each draft, and a middle model's rate."""

    kinds: Mapping[str, tuple[Kind, ...]]
    middle: float = 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speedup of ``of`` over ``over``, both (block, system); ``paper``: as printed."""

    of: tuple[str, str]
    over: tuple[str, str]
    paper: str


@dataclass(frozen=True, slots=True)
class Table:
    """A named experiment.

    ``unit``: ``tokens/s`` of whole calls, prefill included, or ``ms`` per token of decoding.
    """

    title: str
    unit: str
    draft: str
    prompt_tokens: int
    output_tokens: int
    why: str
    oracles: Mapping[str, Oracle]
    blocks: tuple[Block, ...]
    ratios: tuple[Ratio, ...]

    def speedup(self, of: float, over: float) -> float:
        """The speedup of a figure ``of`` over ``over``, both in this table's unit."""
        return of / over if self.unit == "tokens/s" else over / of


def names() -> list[str]:
    """The names of all tables."""
    return sorted(path.stem for path in PLACE.glob("*.toml"))


def load(name: str) -> Table:
    """The table ``name``; for an unknown name, ConfigError lists all."""
    if name not in names():
        raise ConfigError(f"there is no table {name!r}; expected one of: {', '.join(names())}")
    table = tomllib.loads((PLACE / f"{name}.toml").read_text())
    blocks = []
    for block in table.pop("blocks"):
        rows = tuple(PaperRow(**row) for row in block.pop("rows"))
        blocks.append(Block(rows=rows, oracles=tuple(block.pop("oracles")), **block))
    oracles = {key: _oracle(**oracle) for key, oracle in table.pop("oracles").items()}
    ratios = tuple(
        Ratio(tuple(ratio["of"]), tuple(ratio["over"]), ratio["paper"])
        for ratio in table.pop("ratios")
    )
    return Table(oracles=oracles, blocks=tuple(blocks), ratios=ratios, **table)


def _oracle(kinds: Mapping[str, list[dict[str, float]]], middle: float = 0.0) -> Oracle:
    return Oracle({draft: tuple(map(_kind, entries)) for draft, entries in kinds.items()}, middle)


def _kind(entry: Mapping[str, float]) -> Kind:
    """Rates from ``first`` and, if later ranks are ever right, the ``ratio`` of rank to rank."""
    ratio = entry.get("ratio", 0.0)
    rates = geometric(entry["first"], ratio) if ratio else (entry["first"],)
    return Kind(rates, entry.get("share", 1.0))
