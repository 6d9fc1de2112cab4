"""``auto`` against all other systems, tuned, profile by profile, in simulation.

    python -m ops.bench.auto --prompts DIR [--profiles jetson-7b,...] [--per-file 40]
        [--tuning-per-file 8] [--tokens 64] [--drafts head,slm] [--temperatures 0,1]

The others' options are searched (``flowspec.testbed.tuning``) on the tuning half of the first
``--tuning-per-file`` prompts of every file in DIR; everything is measured on the measuring half of
the first ``--per-file``, at the first stage count of each profile. Prompts whose text repeats
itself are left out of both. Of the others, the ``MEASURED`` fastest on the tuning prompts are
measured, untuned and tuned. Times are milliseconds per token over all tokens; the ratio is the
median over prompts of the tuned system's time over ``auto``'s, with its 95% interval by order
statistics. Prints Markdown, row by row. One row takes three to eight minutes on one core, most of
it to draft; ``--profiles``, ``--drafts`` and ``--temperatures`` split the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.cli.generate import read_prompts
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load, names
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.testbed.grid import BenchPlan, Cell, Grid, SweptLink
from flowspec.testbed.naming import canonical
from flowspec.testbed.prompts import Prompt, halve
from flowspec.testbed.report import Estimate, ReportRow, estimate_text
from flowspec.testbed.tuning import Effort, Tuned, Tuner
from flowspec.testbed.tuning_report import paired
from ops.bench.systems import show

BASELINE = "autoregressive"
AUTO = "auto"
OTHERS = (
    *("flowspec", "pipedec", "specpipe", "pipespec", "chain"),
    *("static_tree", "naive_pp", "pruned_pp", "speculative"),
)
DRAFTS = ("head", "slm")
TEMPERATURES = (0.0, 1.0)
#: Systems measured per place, untuned and tuned.
MEASURED = 2
#: Fewest measuring prompts.
LEAST = 24
EFFORT = Effort(configurations=16, few=2, finalists=2)

#: Further columns by name: milliseconds per token of a cell of ``auto``, with its draft source, on
#: the grid's prompts; for bounds that are not strategies.
BOUNDS: dict[str, Callable[[Grid, Cell, str], float]] = {}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Prompts to tune on and to measure on, the tokens of every text, and what is varied."""

    tuning: Sequence[Prompt]
    measuring: Sequence[Prompt]
    tokens: int
    drafts: tuple[str, ...] = DRAFTS
    temperatures: tuple[float, ...] = TEMPERATURES


@dataclass(frozen=True, slots=True)
class Place:
    """A temperature and a draft with what was measured there: ``rows`` by strategy, and the texts
    of the others before and after tuning. ``bounds``: milliseconds per token by name.
    """

    temperature: float
    draft: str
    rows: Mapping[str, ReportRow]
    untuned: Sequence[str]
    tuned: Sequence[str]
    bounds: Mapping[str, float]


def prompts_in(folder: Path, per_file: int, half: str) -> list[Prompt]:
    """A half of the first ``per_file`` prompts of every file of ``folder``."""
    return halve(
        (
            Prompt(file.stem, text)
            for file in sorted(folder.glob("*.jsonl"))
            for text in read_prompts(file)[:per_file]
        ),
        half,
    )


def measure(profile: Profile, inputs: Inputs, least: int = LEAST) -> Iterator[Place]:
    """Every temperature and draft; ConfigError if fewer than ``least`` prompts can be measured."""
    plan = BenchPlan(
        profile,
        (*OTHERS, AUTO),
        inputs.drafts,
        inputs.temperatures,
        profile.stages[:1],
        inputs.tokens,
        no_loops=True,
    )
    grid = Grid(plan, inputs.measuring)
    kept = len({case.number for case in grid.cases})
    if kept < least:
        raise ConfigError(
            f"{kept} of {len(inputs.measuring)} measuring prompts can be used, the others repeat "
            f"themselves or do not fit; expected {least} or more: raise --per-file"
        )
    tuner = Tuner(Grid(plan, inputs.tuning), EFFORT)
    for temperature in inputs.temperatures:
        for draft in inputs.drafts:
            source = canonical(draft)
            others = {
                cell: source
                for cell, its in grid.cells().items()
                if (cell.temperature, its) == (temperature, source) and cell.strategy in OTHERS
            }
            yield _place(grid, temperature, draft, tuner.run(others))


def _place(grid: Grid, temperature: float, draft: str, tuned: Sequence[Tuned]) -> Place:
    """What was measured at ``temperature`` with ``draft``."""
    source = canonical(draft)
    plan = grid.plan
    own = Cell(AUTO, source, plan.stages[0], temperature, SweptLink("", plan.profile.link))
    before = _fastest(tuned, lambda one: one.finalists[one.cell.strategy])
    after = _fastest(tuned, lambda one: one.finalists[one.strategy])
    cells = [
        replace(own, strategy=BASELINE, source="-"),
        own,
        *(one.cell for one in before),
        *(one.measured for one in after),
    ]
    rows = {row.strategy: row for row in grid.run(dict.fromkeys(cells, source))}
    return Place(
        temperature,
        draft,
        rows,
        [one.cell.strategy for one in before],
        [one.strategy for one in after],
        {name: bound(grid, own, source) for name, bound in BOUNDS.items()},
    )


def _fastest(tuned: Sequence[Tuned], seconds: Callable[[Tuned], float]) -> list[Tuned]:
    """The ``MEASURED`` fastest on the tuning prompts."""
    return sorted(tuned, key=seconds)[:MEASURED]


COLUMNS = (
    *("profile, stages", "T", "draft", BASELINE, "best untuned", "best tuned", AUTO),
    *("tuned over auto", "by prompt (95%)"),
)


def line_of(name: str, place: Place) -> str:
    """One row of the table."""
    rows = place.rows
    untuned = _best(rows, place.untuned)
    tuned = _best(rows, place.tuned)
    auto = rows[AUTO]
    ratios = paired(tuned, [auto], AUTO)
    assert ratios is not None
    cells = [
        name,
        f"{place.temperature:g}",
        place.draft,
        _number(rows[BASELINE]),
        f"{untuned.strategy}: {_number(untuned)}",
        f"{tuned.strategy}: {_number(tuned)}",
        _number(auto),
        f"{tuned.tbt['mean'] / auto.tbt['mean']:.2f}",
        estimate_text(Estimate.of(list(ratios.values()))),
        *(f"{place.bounds[bound]:.1f}" for bound in BOUNDS),
    ]
    return f"| {' | '.join(cells)} |"


def _best(rows: Mapping[str, ReportRow], texts: Iterable[str]) -> ReportRow:
    return min((rows[text] for text in texts), key=lambda row: row.tbt["mean"])


def _number(row: ReportRow) -> str:
    milliseconds = row.tbt["mean"] * 1e3
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def run(profiles: Sequence[Profile], inputs: Inputs, least: int = LEAST) -> None:
    """The table, a profile's rows as soon as they are known."""
    columns = (*COLUMNS, *BOUNDS)
    show(f"| {' | '.join(columns)} |")
    show("|---" * len(columns) + "|")
    for profile in profiles:
        for place in measure(profile, inputs, least):
            show(line_of(f"{profile.name}, {profile.stages[0]}", place))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True, help="a folder of .jsonl files")
    parser.add_argument("--profiles", default=",".join(names()), help="by commas; default: all")
    parser.add_argument("--per-file", type=int, default=40, help="prompts of each file (40)")
    parser.add_argument(
        "--tuning-per-file", type=int, default=8, help="prompts of each file to tune on (8)"
    )
    parser.add_argument(
        "--least", type=int, default=LEAST, help=f"fewest measuring prompts ({LEAST})"
    )
    parser.add_argument("--drafts", default=",".join(DRAFTS), help="by commas (head,slm)")
    parser.add_argument("--temperatures", default="0,1", help="by commas (0,1)")
    parser.add_argument("--tokens", type=int, default=64, help="of every text (64)")
    given = parser.parse_args()
    try:
        inputs = Inputs(
            prompts_in(given.prompts, given.tuning_per_file, "tuning"),
            prompts_in(given.prompts, given.per_file, "measuring"),
            given.tokens,
            tuple(given.drafts.split(",")),
            tuple(map(float, given.temperatures.split(","))),
        )
        run([load(name) for name in given.profiles.split(",")], inputs, given.least)
    except (FlowSpecError, ValueError) as error:
        sys.exit(f"flowspec: {error}")


if __name__ == "__main__":
    main()
