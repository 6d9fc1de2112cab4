"""Time between tokens with rows through the broker, beside the same with rows straight.

    python -m ops.bench.way [--profiles a,b] [--strategies "a b"] [--draft head]
                            [--temperatures 0,1] [--tokens 48] [--prompts FILE.jsonl|DIR]
                            [--count N]

The broker is beside the draft worker. Through it, a hop between two stages takes two links;
straight, one (docs/testbed.md#the-way-of-a-message). Every profile runs with its first stage count.
Times are means over all tokens, ratios medians over prompts with their 95% interval by order
statistics. Prints Markdown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flowspec.cli.bench import prompts_in, strategies_of
from flowspec.core.job.stats import repeated_4grams
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load
from flowspec.emulation.way import Way
from flowspec.testbed.grid import BenchPlan, Grid, run_together
from flowspec.testbed.naming import counted
from flowspec.testbed.prompts import Prompt
from flowspec.testbed.report import Estimate, ReportRow, estimate_text
from ops.bench.arguments import count, temperatures
from ops.bench.profile_grids import grids_on
from ops.bench.systems import show
from ops.parser import Parser

PROFILES = "wan-25ms,wan-50ms,wan-100ms,jetson-7b,rtx3090-70b"
STRATEGIES = "autoregressive flowspec specpipe chain auto"
THROUGH = Way("draft", "broker")
STRAIGHT = Way("draft", "straight")
COLUMNS = (
    *("profile", "stages", "T", "strategy"),
    *("through the broker, ms", "straight, ms", "through over straight (95%)"),
    *("speedup through", "speedup straight"),
)


def table(profiles: Sequence[Profile], plan: BenchPlan, prompts: Sequence[Prompt]) -> Iterator[str]:
    """The table's lines; ``plan``'s own profile is not used."""
    ways = [replace(profile, way=way) for profile in profiles for way in (THROUGH, STRAIGHT)]
    grids = grids_on(ways, plan, prompts)
    found = run_together([(grid, grid.cells()) for grid in grids])
    yield about(grids[0])
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for profile, through, straight in zip(profiles, found[::2], found[1::2], strict=True):
        for pair in zip(through, straight, strict=True):
            yield f"| {' | '.join(cells(profile, *pair))} |"


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every set, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append((seen[prompt.set], prompt))
        seen[prompt.set] += 1
    return [prompt for _, prompt in sorted(turns, key=lambda one: one[0])]


def about(grid: Grid) -> str:
    """The line above the table."""
    plan = grid.plan
    numbers = {case.number for case in grid.cases}
    repeated = sum(repeated_4grams(case.text.output) for case in grid.cases) / len(grid.cases)
    return (
        f"{counted(len(numbers), 'prompt')}, {plan.tokens} tokens each, drafts by "
        f"{', '.join(plan.sources)}; repeated 4-grams {repeated:.0%}; speedup over "
        f"{plan.baseline} with rows on the same way; ratios and speedups are medians over prompts, "
        "with intervals from six prompts on."
    )


def cells(profile: Profile, through: ReportRow, straight: ReportRow) -> list[str]:
    """One line's cells from the rows of one system with rows on either way."""
    ratios = [speed / through.speeds[at] for at, speed in straight.speeds.items()]
    return [
        profile.name,
        str(straight.stages),
        f"{straight.temperature:g}",
        straight.strategy,
        *(f"{row.tbt['mean'] * 1e3:.1f}" for row in (through, straight)),
        estimate_text(Estimate.of(ratios)),
        *(estimate_text(row.speedup) for row in (through, straight)),
    ]


def main() -> None:
    parser = Parser()
    parser.add_argument("--profiles", default=PROFILES, help="by commas")
    parser.add_argument("--strategies", default=STRATEGIES, help="by spaces or commas")
    parser.add_argument("--draft", default="head", help="the drafter's name in profiles (head)")
    parser.add_argument("--temperatures", type=temperatures, default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines, a file or a folder; default: the packaged ones"
    )
    parser.add_argument("--count", type=count, help="prompts, of their sets in turn; default: all")
    given = parser.parse_args()
    profiles = [load(name) for name in given.profiles.split(",")]
    plan = BenchPlan(
        profiles[0],
        strategies_of([given.strategies]),
        (given.draft,),
        tuple(given.temperatures),
        profiles[0].stages[:1],
        given.tokens,
    )
    prompts = in_turn(prompts_in(given.prompts))[: given.count]
    for line in table(profiles, plan, prompts):
        show(line)


if __name__ == "__main__":
    main()
