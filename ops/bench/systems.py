"""Every system against every draft source, in simulation, with the default pair's real acceptance.

    python -m ops.bench.systems [--stages 4,8,12] [--temperatures 0,1]
                                [--sources slm,head,ngram,slm+ngram] [--strategies a,b,...]
                                [--tokens 48] [--per-kind 2] [--prompts FILE.jsonl|DIR]
                                [--middles medium]

The unit is one pass of a stage, which costs the same for every stage and any number of rows;
links cost nothing. A drafter pass costs 1/7, so that FlowSpec's drafting for a round (one pass for
the root, six for the layers below it) takes one step. A middle model's pass costs 1/2. ``over
formula``: time between tokens relative to the system's own formula at the acceptance of the same
runs. For layered systems, whose formula ignores partial starvation, that time excludes
``starved``: the steps per token spent behind a gap that a prune left. Prints Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowspec.cli.bench import strategies_of
from flowspec.core.run.sampling import Sampling
from flowspec.core.session.stats import repeated_4grams
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.naming import drafter_of
from flowspec.strategies import EXACT
from ops.bench.formulas import predicted
from ops.bench.simulated import PROMPTS, Text, per_pass, prompts_of, simulate, texts
from ops.parser import Parser

DRAFT_COST = 1 / 7
MIDDLE_COST = 0.5
COLUMNS = (
    "tokens per step",
    "per round",
    "hit rate",
    "useful / wasted / void",
    "TBT, steps",
    "over formula",
    "starved",
)
#: Systems that send one layer per step; their formula covers hits and misses, not starvation.
LAYERED = ("pipedec", "pipedec_head", "specpipe")


class Total:
    """Sums over runs. ``tokens`` leaves out each run's first, which prefill yields."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.units = 0.0
        self.rounds = 0.0
        self.hits = 0.0
        self.starved = 0.0
        self.rows = dict.fromkeys(("useful", "wasted", "void"), 0.0)

    def add(self, stats: dict[str, Any]) -> None:
        """Add one run's stats."""
        tokens = stats["tokens"] - 1
        self.tokens += tokens
        self.units += stats["decode_seconds"]
        self.rounds += stats["rounds"]
        self.starved += stats["starved"]
        self.hits += (stats["hit_rate"] or 0) * tokens
        for fate in self.rows:
            self.rows[fate] += stats["rows"][fate]

    @property
    def hit_rate(self) -> float:
        """Share of tokens that were in the tree when the target chose them."""
        return self.hits / self.tokens

    def line(self, strategy: str, source: str, stages: int, *, formula: bool = True) -> str:
        """One row of the table; ``formula``: whether the system's own formula applies."""
        tbt = self.units / self.tokens
        expected = predicted(strategy, stages, self, DRAFT_COST) if formula else None
        starved = self.starved / self.tokens if strategy.partition(":")[0] in LAYERED else 0.0
        ratio = f"{(tbt - starved) / expected:.3f}" if expected else "-"
        rows = " / ".join(f"{count / self.tokens:.0f}" for count in self.rows.values())
        return (
            f"| {strategy} | {source} | {stages} | {self.tokens / self.units:.3f} | "
            f"{self.tokens / self.rounds:.2f} "
            f"| {self.hit_rate:.3f} | {rows} | {tbt:.3f} | {ratio} | "
            f"{f'{starved:.3f}' if starved else '-'} |"
        )


def drafts(strategy: str, source: str) -> bool:
    """Whether to run the pair: plain decoding drafts nothing and runs with one source only."""
    return strategy != "autoregressive" or source == "slm"


def table(
    runs: Sequence[Text],
    strategies: Sequence[str],
    sources: Sequence[tuple[str, DraftExecutor]],
    stages: Sequence[int],
    emit: Callable[[str], None],
    middles: Mapping[str, Callable[[], StageExecutor]] | None = None,
) -> None:
    """Print one table over ``runs``."""
    target = open_directory(default_pair()[0])
    emit(f"| strategy | draft | stages | {' | '.join(COLUMNS)} |")
    emit("|---|---|---|---|---|---|---|---|---|---|")
    for count in stages:
        for strategy in strategies:
            for name, drafter in sources:
                if not drafts(strategy, name):
                    continue
                total = Total()
                for run in runs:
                    costs = per_pass(DRAFT_COST, MIDDLE_COST)
                    total.add(simulate(run, strategy, count, target, drafter, costs, middles))
                emit(
                    total.line(
                        strategy, "+".join((name, *(middles or ()))), count, formula=not middles
                    )
                )


def chosen_prompts(place: Path, per_kind: int) -> list[str]:
    """``per_kind`` prompts of every kind in a file, or of every file in a folder."""
    if place.is_dir():
        return prompts_of(place, per_kind)
    rows = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
    kinds = dict.fromkeys(row.get("kind", "") for row in rows)
    return [
        row["prompt"]
        for kind in kinds
        for row in [r for r in rows if r.get("kind", "") == kind][:per_kind]
    ]


def _whole(name: str) -> Callable[[], StageExecutor]:
    """A middle model, loaded once."""
    from flowspec.model.stage import load_stage

    directory = open_directory(name)
    loaded = load_stage(directory, range(directory.layers))
    return lambda: loaded


def show(line: str) -> None:
    """Print and flush: a table's rows take long to compute."""
    print(line, flush=True)


def main() -> None:
    parser = Parser()
    parser.add_argument("--stages", default="4,8,12")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--sources", default="slm,head,ngram,slm+ngram")
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="separated by spaces or commas"
    )
    parser.add_argument(
        "--middles", default="", help="models of a chain between draft and target, by name"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    given = parser.parse_args()
    target = open_directory(default_pair()[0])
    names = given.sources.split(",")
    sources = [(name, load_sources(drafter_of(name), target, MemoDrafter)) for name in names]
    hidden = any(drafter.wants_hidden for _, drafter in sources)
    prompts = chosen_prompts(given.prompts, given.per_kind)
    middles = {name: _whole(name) for name in filter(None, given.middles.split(","))}
    strategies = strategies_of([given.strategies])
    for temperature in map(float, given.temperatures.split(",")):
        sampling = Sampling(0.6, 80, 0.9) if temperature == 0.6 else Sampling(temperature)
        runs = texts(prompts, [sampling], given.tokens, target, hidden=hidden)
        repeated = sum(repeated_4grams(run.output) for run in runs) / len(runs)
        print(
            f"\nT = {temperature:g}, {len(runs)} prompts, {given.tokens} tokens; repeated 4-grams "
            f"{repeated:.0%}\n"
        )
        table(runs, strategies, sources, list(map(int, given.stages.split(","))), show, middles)


if __name__ == "__main__":
    main()
