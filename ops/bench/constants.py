"""``auto`` with other values of its searchable options, on the tuning prompts.

    python -m ops.bench.constants --prompts DIR [--jobs 2] [--profiles jetson-7b,...] [--draft head]
                                  [--temperatures 0,1] [--per-file 14] [--tokens 64]

Each option of ``auto`` that can be searched (``Auto.search``) takes each of its values while the
others keep their defaults, on every profile of ``ops.bench.auto``, on the tuning half of the first
``--per-file`` prompts of every file in DIR. A cell is the default's seconds per token over those
with the value, above 1 where the value is faster. Prints Markdown, progress on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load
from flowspec.errors import FlowSpecError
from flowspec.strategies.auto.strategy import Auto, AutoParams
from flowspec.testbed.grid import BenchPlan, Cell, Grid, run_together
from flowspec.testbed.naming import canonical
from flowspec.testbed.prompts import Prompt
from ops.bench.arguments import count, prompt_sets, temperatures
from ops.bench.auto import PROFILES, prompts_in
from ops.bench.profile_grids import cell_of, grids_on
from ops.bench.systems import show
from ops.parser import Parser

DEFAULT = "auto"
#: The options with every value of their search that is not the default.
VARIANTS = tuple(
    f"{DEFAULT}:{option}={value}"
    for option, values in Auto.search.items()
    for value in values
    if float(value) != getattr(AutoParams(), option)
)


@dataclass(frozen=True, slots=True)
class Trial:
    """The profiles, the tuning prompts, tokens per text and the draft of all variants."""

    profiles: Sequence[Profile]
    prompts: Sequence[Prompt]
    tokens: int
    draft: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds per token at a temperature, by variant, on every profile; over ``prompts`` texts."""

    temperature: float
    prompts: int
    profiles: Mapping[str, Mapping[str, float]]


def measured(trial: Trial, temperature: float) -> Measured:
    """All variants on all profiles; texts and drafts are shared."""
    plan = BenchPlan(
        trial.profiles[0],
        (DEFAULT, *VARIANTS),
        (trial.draft,),
        (temperature,),
        tokens=trial.tokens,
        baseline=DEFAULT,
        no_loops=True,
    )
    grids = grids_on(trial.profiles, plan, trial.prompts)
    source = canonical(trial.draft)
    print(f"{len(grids)} profiles at T={temperature:g}", file=sys.stderr, flush=True)
    rows = run_together([(grid, _cells(grid, source, temperature)) for grid in grids])
    times = {
        grid.plan.profile.name: {row.strategy: row.tbt["mean"] for row in its}
        for grid, its in zip(grids, rows, strict=True)
    }
    return Measured(temperature, rows[0][0].prompts, times)


def _cells(grid: Grid, source: str, temperature: float) -> dict[Cell, str]:
    texts = (DEFAULT, *VARIANTS)
    return {cell_of(grid, text, source, temperature): source for text in texts}


def tables(found: Sequence[Measured], tokens: int, draft: str) -> Iterator[str]:
    """What the page says, and a table per temperature."""
    yield (
        f"Draft: {draft}; tuning prompts whose text does not repeat itself, up to {tokens} tokens "
        "each. A cell: seconds per token of `auto` with its defaults over those with the value; "
        "above 1 the value is faster."
    )
    for one in found:
        names = list(one.profiles)
        yield f"\nT = {one.temperature:g}, {one.prompts} prompts:\n"
        yield f"| option | {' | '.join(names)} | geometric mean |"
        yield "|---" * (len(names) + 2) + "|"
        for text in VARIANTS:
            ratios = [times[DEFAULT] / times[text] for times in one.profiles.values()]
            cells = " | ".join(f"{ratio:.2f}" for ratio in (*ratios, geometric_mean(ratios)))
            yield f"| {text.partition(':')[2]} | {cells} |"


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=prompt_sets, required=True, help="a folder of .jsonl files")
    add("--profiles", default=",".join(PROFILES), help="by commas")
    add("--draft", default="head", help="of all variants (head)")
    add("--temperatures", type=temperatures, default="0,1", help="by commas (0,1)")
    add("--per-file", type=count, default=14, help="prompts of each file (14)")
    add("--tokens", type=count, default=64, help="of every text (64)")
    add("--jobs", type=count, default=1, help="temperatures at once (1)")
    given = parser.parse_args()
    try:
        prompts = prompts_in(given.prompts, given.per_file, "tuning")
        profiles = [load(name) for name in given.profiles.split(",")]
        trial = Trial(profiles, prompts, given.tokens, given.draft)
        with ProcessPoolExecutor(given.jobs) as pool:
            found = list(pool.map(partial(measured, trial), given.temperatures))
        show("\n".join(tables(found, given.tokens, given.draft)))
    except FlowSpecError as error:
        sys.exit(f"flowspec: {error}")


if __name__ == "__main__":
    main()
