"""Comparisons for papers: tuned strategies, charts, and the papers' own tables.

    python -m ops.compare tune --profile wan-100ms --strategies "specpipe auto" --draft head
    python -m ops.compare charts --profile jetson-7b --strategies all --plots DIR
    python -m ops.compare table flowspec-1

``tune`` and ``charts`` take what ``flowspec bench`` takes for a run. ``tune`` searches each
strategy's options on half of the prompts and measures on the others; the baseline and the strategy
of ``--against`` stay as they are. ``table list`` prints the names of the tables.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flowspec.cli import bench as plain
from flowspec.cli import notes
from flowspec.cli.bench import DEFAULT_TOKENS, Options, plan_of, progress, prompts_in
from flowspec.cli.outputs import check_writable
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.rehearse.compare.grid import BenchPlan, Grid, Tell
from flowspec.rehearse.compare.prompts import Prompt, halve
from flowspec.rehearse.compare.report import BenchReport, markdown
from ops.compare import plots, tables
from ops.compare.search import Space
from ops.compare.tuning import Tuner
from ops.compare.tuning_report import tuning_header, tuning_markdown
from ops.parser import Parser

#: The strategy that others are compared with unless another is named.
AUTO = "auto"
#: Tokens of the slowest strategy in the time a timeline shows.
_TIMELINE_TOKENS = 5


def tune(options: Options, against: str | None, command: str) -> None:
    """Tune every strategy on half of the prompts, and measure on the others.

    ``against``: the strategy that tuned ones are compared with; None: ``auto``, if it is named.
    """
    plain.check_places(options)
    plan = plan_of(options)
    if against is None and AUTO in plan.strategies:
        against = AUTO
    varied = set(plan.strategies) - {against, plan.baseline}
    _check_searched(plan, varied, against)
    notes.of_plan(plan)
    prompts = prompts_in(options.prompts)
    measuring = halve(prompts, "measuring")
    if not measuring:
        raise ConfigError(
            "tune has no prompt to measure on: of each set (a file, or a kind in a single file) "
            "prompts 1, 3, ... are for tuning and 2, 4, ... for measuring; "
            "give two prompts of a set or more"
        )
    with progress() as tell:
        grid = Grid(plan, measuring, tell)
        report = _tuned(grid, command, halve(prompts, "tuning"), varied, against, tell)
    plain.show(options, report, markdown(report, tuning_markdown(report.header["tuning"])))


def _check_searched(plan: BenchPlan, varied: set[str], against: str | None) -> None:
    """ConfigError if no strategy of ``plan`` has an option to search."""
    if any(Space.of(text).values for text in varied):
        return
    why = {plan.baseline: "is the baseline", against: "is what the others are compared with"}
    reasons = (f"{text} {why.get(text, 'has no option left')}" for text in plan.strategies)
    raise ConfigError(
        f"tune has no option to search: {', '.join(reasons)}; name another strategy, like specpipe"
    )


def _tuned(
    grid: Grid,
    command: str,
    prompts: Sequence[Prompt],
    varied: set[str],
    against: str | None,
    tell: Tell,
) -> BenchReport:
    """The report of ``grid`` with the strategies ``varied`` tuned on ``prompts``.

    Not tuned are ``against`` and the baseline, since every row is compared with that.
    """
    cells = grid.cells()
    tuner = Tuner(Grid(grid.plan, prompts, tell), tell=tell)
    tuned = tuner.run({cell: cells[cell] for cell in cells if cell.strategy in varied})
    found = {one.measured: cells[one.cell] for one in tuned}
    rows = grid.run({**cells, **found})
    header = grid.header(command, "measuring")
    return BenchReport({**header, "tuning": tuning_header(tuner, tuned, rows, against)}, (*rows,))


def charts(options: Options, folder: Path, suffix: str, command: str) -> None:
    """A plain comparison, with every chart of its report and a timeline of each strategy."""
    plots.require()
    plain.check_places(options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots: folder {folder} cannot be made: {error}") from None
    check_writable("--plots", folder / "chart")
    plan = plan_of(options)
    notes.of_plan(plan)
    with progress() as tell:
        grid = Grid(plan, halve(prompts_in(options.prompts), options.half), tell)
        report = BenchReport(grid.header(command, options.half), tuple(grid.run()))
    plain.show(options, report, markdown(report))
    _draw(report, grid, folder, suffix)


def _draw(report: BenchReport, grid: Grid, folder: Path, suffix: str) -> None:
    """Timelines are of the first prompt."""
    for name, draw in plots.charts(report):
        plots.save(draw(), folder / f"{name}{suffix}")
    plan = grid.plan
    shown = [
        row
        for row in report.rows
        if (row.stages, row.temperature) == (plan.stages[0], plan.temperatures[0])
    ]
    seconds = _TIMELINE_TOKENS * max(row.tbt["mean"] for row in shown if not row.swept)
    counted: Counter[str] = Counter()
    for strategy in plan.runs:
        taken = plots.Timeline()
        prompt_rows = grid.follow(strategy, taken)
        title = f"{strategy}: {plan.profile.name}, simulated, T = {plan.temperatures[0]:g}"
        name = strategy.partition(":")[0]
        counted[name] += 1
        number = f"-{counted[name]}" if counted[name] > 1 else ""
        file = folder / f"timeline-{name}{number}{suffix}"
        plots.save(plots.timeline(taken, prompt_rows, seconds, title), file)


def table(name: str, prompts: Path | None, tokens: int) -> None:
    """Print a paper's table beside our figures; for ``list`` the names and titles of all."""
    if name == "list":
        width = max(map(len, tables.names())) + 2
        for one in tables.names():
            print(f"{one:<{width}}{tables.title(one)}")
        return
    if name not in tables.names():
        raise ConfigError(
            f"there is no table {name!r}; expected one of: {', '.join(tables.names())}"
        )
    texts = None if prompts is None else [prompt.text for prompt in prompts_in(prompts)]
    if sys.stderr.isatty():
        sys.stderr.write(
            f"running {name}, which can take minutes; lines appear as they are known\n"
        )
    tables.run(name, lambda line: print(line, flush=True), prompts=texts, tokens=tokens)


def _parser() -> Parser:
    parser = Parser(prog="python -m ops.compare", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in (("tune", tune.__doc__), ("charts", charts.__doc__)):
        one = commands.add_parser(name, help=(about or "").partition("\n")[0])
        one.add_argument("--profile", default="jetson-7b")
        one.add_argument("--strategies", "--strategy", action="append")
        one.add_argument("--draft", default="slm", help="draft sources, by commas")
        one.add_argument("--temperatures", default="0", help="by commas")
        one.add_argument("--stages", help="counts, by commas; default: the profile's first")
        one.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
        one.add_argument("--prompts", type=Path, metavar="FILE")
        one.add_argument("--no-loops", action="store_true")
        one.add_argument("--baseline", default="autoregressive")
        one.add_argument("--seed", type=int, default=1)
        one.add_argument("--sweep", action="append", default=[], help="latency=MS,... or mbit=N")
        one.add_argument("--broker")
        one.add_argument("--rows", choices=("straight", "broker"))
        one.add_argument("--out", type=Path, metavar="FILE.json")
        one.add_argument("--markdown", type=Path, metavar="FILE.md")
        if name == "tune":
            one.add_argument("--against", help="run untuned, and compared with; default: auto")
        else:
            one.add_argument("--half", default="all", choices=("tuning", "measuring", "all"))
            one.add_argument("--plots", type=Path, metavar="DIR", required=True)
            one.add_argument("--plot-format", default="svg", choices=("svg", "png"))
    one = commands.add_parser("table", help=(table.__doc__ or "").partition("\n")[0])
    one.add_argument("name")
    one.add_argument("--prompts", type=Path, metavar="FILE")
    one.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    given = vars(_parser().parse_args(words))
    command = shlex.join(["python", "-m", "ops.compare", *words])
    try:
        match given.pop("command"):
            case "table":
                table(**given)
            case "tune":
                against = given.pop("against")
                extra = () if against is None else (against,)
                given["strategies"] = [*(given["strategies"] or ["all"]), *extra]
                tune(Options(**given, half="all"), against, command)
            case "charts":
                folder, suffix = given.pop("plots"), given.pop("plot_format")
                given["strategies"] = given["strategies"] or ["all"]
                charts(Options(**given), folder, f".{suffix}", command)
    except FlowSpecError as error:
        sys.exit(f"compare: {error}")


if __name__ == "__main__":
    main()
