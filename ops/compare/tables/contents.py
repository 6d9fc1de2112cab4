"""Content of a paper's table, from a TOML file here: systems, clusters, figures, hit rates."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError
from flowspec.rehearse.compare.hits import Kind, geometric

PLACE = Path(__file__).parent
#: Texts per figure at a paper's hit rate, unless a table says otherwise.
TEXTS = 16
#: Columns per source of figures, unless a table says otherwise.
DEFAULT_COLUMNS = ("value", "x", "hit", "difference", "interval")


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A system as its authors ran it.

    ``strategy``: empty: it is not simulated, only its published figures are shown. ``draft``:
    empty: the table's. ``middles``: number of middle models. ``paper``: its published figure;
    None: there is none. ``printed``: published cells, for a row that is not simulated.
    """

    system: str
    strategy: str = ""
    paper: float | None = None
    draft: str = ""
    middles: int = 0
    printed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Systems compared on one cluster with one sampling, at the hit rates of ``oracles``.

    ``latency_ms``, ``mbit``: of every link; None: the profile's. ``pair``: also with the packaged
    models, which draw with each of ``seeds``.
    """

    name: str
    profile: str
    stages: int
    temperature: float
    oracles: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    top_k: int = 0
    top_p: float = 1.0
    seeds: tuple[int, ...] = (0,)
    latency_ms: float | None = None
    mbit: float | None = None
    pair: bool = True

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """How the packaged target chooses, once per seed."""
        return tuple(
            Sampling(self.temperature, self.top_k, self.top_p, seed) for seed in self.seeds
        )


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
    ``claim``: the paper's conclusion, where it prints no figures. ``columns``: names in
    ``columns.COLUMNS``. ``texts``: number of texts at a paper's hit rate. ``kv_bytes``: keys and
    values of one row in one layer, for the column of memory.
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
    claim: str = ""
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    texts: int = TEXTS
    kv_bytes: int = 0

    def speedup(self, of: float, over: float) -> float:
        """The speedup of a figure ``of`` over ``over``, both in this table's unit."""
        return of / over if self.unit == "tokens/s" else over / of

    @property
    def drafts(self) -> frozenset[str]:
        """The draft sources of all simulated rows."""
        rows = (row for block in self.blocks for row in block.rows if row.strategy)
        return frozenset(row.draft or self.draft for row in rows)


def names() -> list[str]:
    """The names of all tables."""
    return sorted(path.stem for path in PLACE.glob("*.toml"))


def load(name: str) -> Table:
    """The table ``name``; for an unknown name, ConfigError lists all."""
    if name not in names():
        raise ConfigError(f"there is no table {name!r}; expected one of: {', '.join(names())}")
    table = tomllib.loads((PLACE / f"{name}.toml").read_text(encoding="utf-8"))
    blocks = tuple(_block(block) for block in table.pop("blocks"))
    oracles = {key: _oracle(**oracle) for key, oracle in table.pop("oracles", {}).items()}
    ratios = tuple(
        Ratio(tuple(ratio["of"]), tuple(ratio["over"]), ratio["paper"])
        for ratio in table.pop("ratios", [])
    )
    columns = tuple(table.pop("columns", DEFAULT_COLUMNS))
    return Table(oracles=oracles, blocks=blocks, ratios=ratios, columns=columns, **table)


def _block(entry: dict[str, Any]) -> Block:
    rows = tuple(_row(row) for row in entry.pop("rows"))
    oracles = tuple(entry.pop("oracles", ()))
    seeds = tuple(entry.pop("seeds", (0,)))
    return Block(rows=rows, oracles=oracles, seeds=seeds, **entry)


def _row(entry: dict[str, Any]) -> PaperRow:
    return PaperRow(printed=tuple(map(str, entry.pop("printed", ()))), **entry)


def _oracle(kinds: Mapping[str, list[dict[str, float]]], middle: float = 0.0) -> Oracle:
    return Oracle({draft: tuple(map(_kind, entries)) for draft, entries in kinds.items()}, middle)


def _kind(entry: Mapping[str, float]) -> Kind:
    """Rates from ``first`` and, if later ranks are ever right, the ``ratio`` of rank to rank."""
    ratio = entry.get("ratio", 0.0)
    rates = geometric(entry["first"], ratio) if ratio else (entry["first"],)
    return Kind(rates, entry.get("share", 1.0))
