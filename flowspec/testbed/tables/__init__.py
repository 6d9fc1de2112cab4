"""The papers' tables, measured again under the virtual clock, beside the papers' figures.

Every system of a table runs on the profile of the paper's machines, once with models of the
paper's hit rates (``hits``), once with the packaged models. A table's content is a TOML file here:
systems, published figures, hit rates with their arithmetic, and why our figures differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowspec.errors import ConfigError
from flowspec.testbed.tables.contents import PLACE, Block, Table, load, names
from flowspec.testbed.tables.figures import TEXTS, Figure, Pair, at_hit_rate

__all__ = ["names", "run"]

Tell = Callable[[str], None]
#: A table's figures by (block, system): one per oracle of the block, then our pair's.
Known = dict[tuple[str, str], list[Figure]]


def run(name: str, tell: Tell, *, prompts: Sequence[str] | None = None, tokens: int = 64) -> None:
    """Measure the table ``name`` and call ``tell`` with its Markdown, line by line.

    The packaged models answer ``prompts`` (None: the six packaged ones) with ``tokens`` tokens
    each. ConfigError for an unknown name, no prompts, or fewer than 2 tokens.
    """
    if prompts is None:
        prompts = (PLACE / "prompts.txt").read_text().splitlines()
    if not prompts or tokens < 2:
        raise ConfigError(
            f"{len(prompts)} prompts of {tokens} tokens; expected at least one, of 2 or more"
        )
    table = load(name)
    pair = Pair(table, prompts, tokens)
    known: Known = {}
    tell(f"## {table.title}\n")
    tell(
        f"{table.unit}. At the paper's hit rate: {TEXTS} texts of {table.prompt_tokens} + "
        f"{table.output_tokens} tokens "
        f"through models of settable rates. Our pair: {len(prompts)} prompts x {tokens} tokens, "
        "the packaged models. "
        "Simulated; x: times the first system's speed; hit: share of tokens in the tree when they "
        "were chosen.\n"
    )
    for block in table.blocks:
        _tell_block(table, block, pair, known, tell)
    _tell_ratios(table, known, tell)
    tell(f"{table.why.strip()}")


def _tell_block(table: Table, block: Block, pair: Pair, known: Known, tell: Tell) -> None:
    sources = [*block.oracles, "our pair"]
    heads = (f"{source} | x | hit | difference" for source in sources)
    tell(f"### {block.name}: {block.profile}, {block.stages} stages, T = {block.temperature:g}\n")
    tell(f"| system | paper | x | {' | '.join(heads)} |")
    tell("|---" * (3 + 4 * len(sources)) + "|")
    first: list[Figure] = []
    for row in block.rows:
        figures = [
            at_hit_rate(table, block, row, table.oracles[name], TEXTS) for name in block.oracles
        ]
        figures.append(pair.figure(block, row))
        known[block.name, row.system] = figures
        first = first or figures
        paper = block.rows[0].paper
        cells = [
            _number(row.paper),
            _number(table.speedup(row.paper, paper) if row.paper and paper else None),
        ]
        for figure, base in zip(figures, first, strict=True):
            difference = f"{figure.value / row.paper - 1:+.0%}" if row.paper else "-"
            speedup = table.speedup(figure.value, base.value)
            cells += [_number(figure.value), _number(speedup), f"{figure.hit_rate:.3f}", difference]
        tell(f"| {row.system} | {' | '.join(cells)} |")
    repeated = sum(known[block.name, row.system][-1].repeated for row in block.rows) / len(
        block.rows
    )
    tell(f"\nRepeated 4-grams in our pair's texts: {repeated:.2f}.\n")


def _tell_ratios(table: Table, known: Known, tell: Tell) -> None:
    for ratio in table.ratios:
        block = next(block for block in table.blocks if block.name == ratio.of[0])
        pairs = zip([*block.oracles, "our pair"], known[ratio.of], known[ratio.over], strict=True)
        found = (
            f"{source} {table.speedup(of.value, over.value):.2f}" for source, of, over in pairs
        )
        over = ratio.over[1] if ratio.over[0] == ratio.of[0] else ", ".join(ratio.over)
        tell(f"- {', '.join(ratio.of)} over {over}: paper {ratio.paper}; {'; '.join(found)}")
    tell("")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
