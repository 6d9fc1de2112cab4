"""The papers' tables, measured again under the virtual clock, beside the papers' figures.

Every system of a table runs on the profile of the paper's machines, with models of the paper's hit
rates (``hits``) where it states any, and with the packaged models. A table's content is a TOML file
here: systems, published figures, hit rates with their arithmetic, and why our figures differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowspec.errors import ConfigError
from ops.compare.tables.columns import COLUMNS, Shown, number
from ops.compare.tables.contents import PLACE, TEXTS, Block, PaperRow, Table, load, names
from ops.compare.tables.figures import Figure, Pair, at_hit_rate, lossy

__all__ = ["names", "run", "title"]

Tell = Callable[[str], None]
#: Figures by source: an oracle's name, or ``OURS``.
Figures = Mapping[str, Figure]
#: A table's figures by (block, system).
Known = dict[tuple[str, str], Figures]

OURS = "our pair"


def title(name: str) -> str:
    """The title of the table ``name``."""
    return load(name).title


def run(name: str, tell: Tell, *, prompts: Sequence[str] | None = None, tokens: int = 64) -> None:
    """Measure the table ``name`` and call ``tell`` with its Markdown, line by line.

    The packaged models answer ``prompts`` (None: the six packaged ones) with ``tokens`` tokens
    each. ConfigError for an unknown name, no prompts, or fewer than 2 tokens.
    """
    if prompts is None:
        prompts = (PLACE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    if not prompts or tokens < 2:
        raise ConfigError(
            f"{len(prompts)} prompts of {tokens} tokens; expected at least one, of 2 or more"
        )
    table = load(name)
    pair = Pair(table, prompts, tokens)
    known: Known = {}
    tell(f"## {table.title}\n")
    tell(_about(table, len(prompts), tokens))
    for block in table.blocks:
        _tell_block(table, block, pair, known, tell)
    _tell_ratios(table, known, tell)
    tell(f"{table.why.strip()}")


def _about(table: Table, prompts: int, tokens: int) -> str:
    unit = {"ms": "ms per token"}.get(table.unit, table.unit)
    said = [f"Speeds in {unit}."] if "value" in table.columns else []
    if any(block.oracles for block in table.blocks):
        said.append(
            f"At the paper's hit rate: {_count(table)} texts of {table.prompt_tokens} + "
            f"{table.output_tokens} tokens through models of settable rates."
        )
    if any(block.pair for block in table.blocks):
        said.append(f"Our pair: {prompts} prompts x {tokens} tokens, the packaged models.")
    notes = [COLUMNS[name].note for name in table.columns]
    said.append(f"{'; '.join(('Simulated', *filter(None, notes)))}.\n")
    if table.claim:
        said.append(f"\n{table.claim.strip()}\n")
    return " ".join(said)


def _count(table: Table) -> int:
    """Texts per figure at a paper's hit rate."""
    return min(table.texts, TEXTS)


def _sources(block: Block) -> list[str]:
    return [*block.oracles, OURS] if block.pair else list(block.oracles)


def _tell_block(table: Table, block: Block, pair: Pair, known: Known, tell: Tell) -> None:
    sources = _sources(block)
    compared = "difference" in table.columns
    heads = ["system", "paper", "x"] if compared else ["system"]
    for source in sources:
        first, *others = (head for name in table.columns for head in COLUMNS[name].heads)
        heads += [f"{source}: {first}" if first else source, *others]
    tell(f"### {block.name}: {block.profile}, {block.stages} stages, {_sampling(block)}\n")
    tell(f"| {' | '.join(heads)} |")
    tell("|---" * len(heads) + "|")
    base: Figures = {}
    for row in block.rows:
        figures = _figures(table, block, row, pair)
        known[block.name, row.system] = figures
        base = {**figures, **base}
        cells = [row.system]
        if compared:
            paper = block.rows[0].paper
            speedup = table.speedup(row.paper, paper) if row.paper and paper else None
            cells += [number(row.paper), number(speedup)]
        for source in sources:
            cells += _cells(table, block, row, figures.get(source), base.get(source))
        tell(f"| {' | '.join(cells)} |")
    ours = [
        figures[OURS] for row in block.rows if OURS in (figures := known[block.name, row.system])
    ]
    measured = [figure.repeated for figure in ours if figure.runs]
    tell("")
    if measured:
        repeated = sum(measured) / len(measured)
        tell(f"Repeated 4-grams in our pair's texts: {repeated:.2f}.\n")


def _sampling(block: Block) -> str:
    limits = [f"top-p {block.top_p:g}"] if block.top_p < 1 else []
    limits += [f"top-k {block.top_k}"] if block.top_k else []
    return ", ".join([f"T = {block.temperature:g}", *limits])


def _figures(table: Table, block: Block, row: PaperRow, pair: Pair) -> Figures:
    """The row's figures from every source that has its models."""
    if not row.strategy:
        return {}
    draft = row.draft or table.draft
    found = {
        name: at_hit_rate(table, block, row, table.oracles[name], _count(table))
        for name in block.oracles
        if draft in table.oracles[name].kinds and not lossy(row)
    }
    return {**found, OURS: pair.figure(block, row)} if block.pair else found


def _cells(
    table: Table, block: Block, row: PaperRow, figure: Figure | None, base: Figure | None
) -> list[str]:
    if figure is None or base is None:
        width = sum(len(COLUMNS[name].heads) for name in table.columns)
        return [*row.printed, *["-"] * (width - len(row.printed))]
    shown = Shown(table, block, row, figure, base)
    return [cell for name in table.columns for cell in COLUMNS[name].cells(shown)]


def _tell_ratios(table: Table, known: Known, tell: Tell) -> None:
    for ratio in table.ratios:
        of, over = known[ratio.of], known[ratio.over]
        found = (
            f"{source} {table.speedup(of[source].value, over[source].value):.2f}"
            for source in of
            if source in over
        )
        than = ratio.over[1] if ratio.over[0] == ratio.of[0] else ", ".join(ratio.over)
        tell(f"- {', '.join(ratio.of)} over {than}: paper {ratio.paper}; {'; '.join(found)}")
    if table.ratios:
        tell("")
