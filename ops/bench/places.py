"""Every system with every draft source, by stages and latency, simulated on one profile.

    python -m ops.bench.places --profile ops/bench/smollm2-cpu.toml --prompts DIR
        [--strategies all] [--draft ngram,head,head+ngram,head:ngram] [--stages 1,2,4]
        [--latencies 0,0.5,1,5,25] [--temperatures 0] [--per-file 2] [--tokens 48] [--jobs 1]

Milliseconds per token after a text's first, over all tokens of the last ``--per-file`` prompts of
every file in DIR, and tokens per round.
Strategies have their default options. Only ``auto`` chooses among sources joined by ``:``; the
others are not run with them. ``--jobs``: stage counts simulated at once. Prints Markdown
(``ops/bench/results/smollm2-systems.md``), progress on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from flowspec.cli.bench import strategies_of
from flowspec.core.session.stats import repeated_4grams
from flowspec.rehearse.compare.grid import BenchPlan, Grid, SweptLink
from flowspec.rehearse.compare.naming import choices_of
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.compare.report import ReportRow
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load
from ops.bench.arguments import count, counts, latencies, prompt_sets, temperatures
from ops.parser import Parser
from ops.prompts import last_prompts


def plan_of(
    profile: Profile,
    strategies: tuple[str, ...],
    sources: tuple[str, ...],
    latencies: Sequence[float],
    temperatures: tuple[float, ...],
    tokens: int,
    stages: int,
) -> BenchPlan:
    """The runs with ``stages`` stages; ``latencies``: of the links, in milliseconds, one way."""
    links = [replace(profile.link, latency=latency / 1e3) for latency in latencies]
    return BenchPlan(
        replace(profile, link=links[0]),
        strategies,
        sources,
        temperatures,
        (stages,),
        tokens,
        links=tuple(SweptLink("latency", link) for link in links[1:]),
    )


def tables(grid: Grid) -> list[str]:
    """A table per temperature: a line for every strategy and source, a column for every link."""
    cells = {
        cell: source
        for cell, source in grid.cells().items()
        if len(choices_of(source)) == 1 or len(choices_of(cell.source)) > 1
    }
    print(f"{grid.plan.stages[0]} stages: {len(cells)} cells", file=sys.stderr, flush=True)
    found = grid.run(cells)
    lines = []
    for temperature in grid.plan.temperatures:
        cases = grid.cases_at(temperature)
        repeated = sum(repeated_4grams(case.text.output) for case in cases) / len(cases)
        lines += [
            "",
            f"### {grid.plan.stages[0]} stages, T = {temperature:g}",
            "",
            f"{len(cases)} prompts, {grid.plan.tokens} tokens; repeated 4-grams {repeated:.0%}.",
            "",
            *_table([row for row in found if row.temperature == temperature]),
        ]
    return lines


def _table(rows: Sequence[ReportRow]) -> list[str]:
    links = sorted({row.latency_ms for row in rows})
    least = {link: min(row.tbt["mean"] for row in rows if row.latency_ms == link) for link in links}
    lines = [
        "| strategy | draft |" + "".join(f" {link:g} ms |" for link in links),
        "|---|---|" + "---|" * len(links),
    ]
    by_system: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        shown = by_system.setdefault((row.strategy, row.source), {})
        shown[row.latency_ms] = _shown(row, least[row.latency_ms])
    for (strategy, source), shown in by_system.items():
        lines.append(f"| {strategy} | {source} |" + "".join(shown[link] for link in links))
    return lines


def _shown(row: ReportRow, least: float) -> str:
    mean = row.tbt["mean"]
    mark = "**" if mean == least else ""
    return f" {mark}{mean * 1e3:.1f}{mark}, {row.tokens_per_round:.2f} |"


def main() -> None:
    parser = Parser()
    parser.add_argument("--profile", required=True)
    parser.add_argument("--prompts", type=prompt_sets, required=True, metavar="DIR")
    parser.add_argument("--strategies", default="all")
    parser.add_argument("--draft", default="ngram,head,head+ngram,head:ngram")
    parser.add_argument("--stages", type=counts, default="1,2,4")
    parser.add_argument("--latencies", type=latencies, default="0,0.5,1,5,25")
    parser.add_argument("--temperatures", type=temperatures, default="0")
    parser.add_argument("--per-file", type=count, default=2)
    parser.add_argument("--tokens", type=count, default=48)
    parser.add_argument("--jobs", type=count, default=1)
    given = parser.parse_args()
    profile = load(given.profile)
    plan = partial(
        plan_of,
        profile,
        strategies_of([given.strategies]),
        tuple(given.draft.split(",")),
        given.latencies,
        tuple(given.temperatures),
        given.tokens,
    )
    prompts = last_prompts(given.prompts, given.per_file)
    plans = [plan(stages) for stages in given.stages]
    print(f"{profile.summary}. Source: {profile.source}.")
    with ProcessPoolExecutor(given.jobs) as pool:
        for lines in pool.map(partial(_taken, prompts), plans):
            print("\n".join(lines), flush=True)


def _taken(prompts: Sequence[Prompt], plan: BenchPlan) -> list[str]:
    return tables(Grid(plan, prompts))


if __name__ == "__main__":
    main()
