"""``flowspec bench`` and ``flowspec simulate``: strategies compared on a simulated cluster."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flowspec.cli import notes
from flowspec.cli.generate import read_prompts
from flowspec.cli.outputs import check_distinct, check_writable, write
from flowspec.cli.parser import positive
from flowspec.core.run.spec import JobSpec
from flowspec.emulation.profile import Profile
from flowspec.errors import ConfigError
from flowspec.strategies import EXACT
from flowspec.testbed.prompts import Prompt, halve

if TYPE_CHECKING:
    from flowspec.testbed.grid import BenchPlan, Grid, SweptLink, Tell
    from flowspec.testbed.report import BenchReport

T = TypeVar("T")

DEFAULT_TOKENS = 48
#: The strategy that others are compared with unless another is named.
AUTO = "auto"
#: Tokens of the slowest strategy in the time a timeline shows.
_TIMELINE_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``bench``; None: the default."""

    profile: str
    strategies: Sequence[str]
    draft: str
    temperatures: str
    stages: str | None
    tokens: int | None
    prompts: Path | None
    half: str
    no_loops: bool
    baseline: str
    seed: int
    sweep: Sequence[str]
    out: Path | None
    markdown: Path | None
    plots: Path | None
    plot_format: str
    tune: bool = False
    against: str | None = None
    broker: str | None = None
    rows: str | None = None


def bench(options: Options) -> None:
    """Run the comparison; Markdown goes to stdout unless a file is given for it."""
    from flowspec.testbed.grid import Grid
    from flowspec.testbed.report import BenchReport, markdown
    from flowspec.testbed.tuning_report import tuning_markdown

    _check_places(options)
    _check_tuning(options)
    plan = _plan(options)
    if options.tune:
        _check_searched(plan, _against(options))
    notes.of_plan(plan)
    prompts = prompts_in(options.prompts)
    with _progress() as tell:
        half = "measuring" if options.tune else options.half
        if options.tune:
            _check_halves(prompts)
        grid = Grid(plan, halve(prompts, half), tell)
        header = grid.header(_command(), half)
        if options.tune:
            report = _tuned(grid, header, halve(prompts, "tuning"), _against(options), tell)
        else:
            report = BenchReport(header, tuple(grid.run()))
    tuning = tuning_markdown(report.header["tuning"]) if options.tune else ()
    if options.out is not None:
        write("--out", options.out, report.text())
    if options.markdown is not None:
        write("--markdown", options.markdown, markdown(report, tuning))
    else:
        sys.stdout.write(markdown(report, tuning))
    if options.plots is not None:
        _draw(report, grid, options.plots, f".{options.plot_format}")


def _check_tuning(options: Options) -> None:
    """ConfigError for flags that exclude each other."""
    if options.tune and options.half != "all":
        raise ConfigError(
            "--tune takes no --half: it tunes on the one half and measures on the other; "
            "leave out the one or the other"
        )
    if options.tune and options.plots is not None:
        raise ConfigError("--tune draws no charts; leave out --plots or --tune")
    if options.against is not None and not options.tune:
        raise ConfigError("--against needs --tune; expected both or neither")


def _check_searched(plan: BenchPlan, against: str | None) -> None:
    """ConfigError if no strategy of ``plan`` has an option to search."""
    from flowspec.testbed.search import Space

    if any(Space.of(text).values for text in _varied(plan, against)):
        return
    why = {plan.baseline: "is the baseline", against: "is what the others are compared with"}
    reasons = (f"{text} {why.get(text, 'has no option left')}" for text in plan.strategies)
    raise ConfigError(
        f"--tune has no option to search: {', '.join(reasons)}; name another strategy, "
        "like specpipe"
    )


def _check_halves(prompts: Sequence[Prompt]) -> None:
    """ConfigError if there is no prompt to tune on or none to measure on."""
    if not halve(prompts, "measuring"):
        raise ConfigError(
            "--tune has no prompt to measure on: of each set (a file, or a kind in a single file) "
            "prompts 1, 3, ... are for tuning and 2, 4, ... for measuring; "
            "give two prompts of a set or more"
        )


def _varied(plan: BenchPlan, against: str | None) -> set[str]:
    """The strategies that are tuned."""
    return set(plan.strategies) - {against, plan.baseline}


def _against(options: Options) -> str | None:
    """The strategy that tuned ones are compared with; None: with none."""
    if options.against is not None:
        return options.against
    return AUTO if AUTO in strategies_of(options.strategies) else None


def _tuned(
    grid: Grid,
    header: dict[str, Any],
    prompts: Sequence[Prompt],
    against: str | None,
    tell: Tell,
) -> BenchReport:
    """The report of ``grid`` with strategies tuned on ``prompts``.

    Not tuned are ``against`` and the baseline, since every row is compared with that.
    """
    from flowspec.testbed.grid import Grid
    from flowspec.testbed.report import BenchReport
    from flowspec.testbed.tuning import Tuner
    from flowspec.testbed.tuning_report import tuning_header

    cells = grid.cells()
    varied = _varied(grid.plan, against)
    tuner = Tuner(Grid(grid.plan, prompts, tell), tell=tell)
    tuned = tuner.run({cell: cells[cell] for cell in cells if cell.strategy in varied})
    found = {one.measured: cells[one.cell] for one in tuned}
    rows = grid.run({**cells, **found})
    return BenchReport({**header, "tuning": tuning_header(tuner, tuned, rows, against)}, (*rows,))


def _plan(options: Options) -> BenchPlan:
    from flowspec.testbed.grid import BenchPlan

    profile = _cluster(options.profile, options.broker, options.rows)
    return BenchPlan(
        profile,
        _strategies(options),
        _list(options.draft, str, "--draft", "names like slm,head"),
        _list(
            options.temperatures,
            _temperature,
            "--temperatures",
            "numbers of 0 (greedy) or more, like 0,1",
        ),
        profile.stages[:1] if options.stages is None else _counts(options.stages),
        DEFAULT_TOKENS if options.tokens is None else options.tokens,
        options.seed,
        options.baseline,
        tuple(link for text in options.sweep for link in _links(text, profile)),
        options.no_loops,
    )


def _cluster(name: str, broker: str | None, rows: str | None) -> Profile:
    """The profile ``name``; ``broker`` and ``rows`` replace its own unless they are None."""
    from flowspec.emulation.profiles import load

    profile = load(name)
    given = {"at": broker, "rows": rows}
    changed = {key: value for key, value in given.items() if value is not None}
    return replace(profile, way=replace(profile.way, **changed))


def _strategies(options: Options) -> tuple[str, ...]:
    """The strategies to run; the one that others are compared with is run, too."""
    given = strategies_of(options.strategies)
    extra = () if options.against is None else (options.against,)
    return tuple(dict.fromkeys((*given, *extra)))


def _check_places(options: Options) -> None:
    """ConfigError, before anything is computed, if a result could not be written."""
    from flowspec.testbed import plots

    files = {"--out": options.out, "--markdown": options.markdown}
    for flag, file in files.items():
        if file is not None:
            check_writable(flag, file)
    check_distinct(files)
    if options.plots is None:
        return
    plots.require()
    if f".{options.plot_format}" not in plots.FORMATS:
        raise ConfigError(f"--plot-format is {options.plot_format!r}; expected svg or png")
    try:
        options.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots: folder {options.plots} cannot be made: {error}") from None
    check_writable("--plots", options.plots / "chart")


def _command() -> str:
    return shlex.join(["flowspec", *sys.argv[1:]])


def simulate(
    prompt: str | None,
    prompts: Path | None,
    profile: str,
    stages: int | None,
    strategy: str,
    draft: str,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    *,
    as_json: bool,
    broker: str | None = None,
    rows: str | None = None,
) -> None:
    """Run one strategy and print a table, or with ``as_json`` a file as ``bench --out`` writes."""
    from flowspec.testbed.grid import BenchPlan, Grid
    from flowspec.testbed.report import BenchReport, described, sentence

    if prompt is not None and prompts is not None:
        raise ConfigError("give either a PROMPT or --prompts FILE.jsonl, not both")
    if prompt is not None:
        JobSpec(prompt)  # raises if the prompt is invalid
    cluster = _cluster(profile, broker, rows)
    count = cluster.stages[0] if stages is None else stages
    plan = BenchPlan(cluster, (strategy,), (draft,), (temperature,), (count,), max_new_tokens, seed)
    notes.of_plan(plan)
    asked = [Prompt("prompt", prompt)] if prompt is not None else prompts_in(prompts)
    with _progress() as tell:
        grid = Grid(plan, asked, tell)
        row = next(row for row in grid.run() if row.strategy == strategy)
    if as_json:
        sys.stdout.write(BenchReport(grid.header(_command(), "all"), (row,)).text())
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"Simulated: {cluster.name}, {count} stages. {cluster.summary}.\n"
        f"Source: {cluster.source}. {sentence(str(cluster.way))}",
        markup=False,
    )
    for name, value in described(row):
        console.print(f"{name + '  ':<50}{value}", markup=False)


def compare(old: Path, new: Path) -> None:
    """Print the changes between two files that ``bench`` wrote."""
    from flowspec.testbed.report import compare

    sys.stdout.write(compare(old, new))


def table(name: str, prompts: Path | None, tokens: int | None) -> None:
    """Print a paper's table beside our figures; for ``list`` the names and titles of all."""
    from flowspec.testbed import tables

    if name == "list":
        width = max(map(len, tables.names())) + 2
        for one in tables.names():
            sys.stdout.write(f"{one:<{width}}{tables.title(one)}\n")
        return
    if name not in tables.names():
        raise ConfigError(
            f"there is no table {name!r}; expected one of: {', '.join(tables.names())}"
        )

    def tell(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    texts = None if prompts is None else [prompt.text for prompt in prompts_in(prompts)]
    if sys.stderr.isatty():
        sys.stderr.write(
            f"running {name}, which can take minutes; lines appear as they are known\n"
        )
    tables.run(name, tell, prompts=texts, tokens=DEFAULT_TOKENS if tokens is None else tokens)


def strategies_of(given: Sequence[str]) -> tuple[str, ...]:
    """Strategies from flags that each hold one or several, separated by spaces or commas.

    ``all``: every exact one. A piece ``option=value`` after a comma belongs to the strategy before
    it.
    """
    found: list[str] = []
    for text in given:
        for word in text.split():
            pieces = [piece for piece in word.split(",") if piece]
            for number, piece in enumerate(pieces):
                option = "=" in piece and ":" not in piece.partition("=")[0]
                if option and number:
                    found[-1] += f",{piece}"
                else:
                    found += EXACT if piece == "all" else (piece,)
    return tuple(dict.fromkeys(found))


def prompts_in(place: Path | None) -> list[Prompt]:
    """Prompts of a JSON-lines file or of every such file in a folder; None: the packaged ones.

    A prompt's set is its file's name; in a single file, its ``kind`` if it has one.
    """
    from flowspec.testbed import grid

    place = place or Path(grid.__file__).with_name("prompts.jsonl")
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"folder {place} has no .jsonl files; expected at least one with prompts")
    found = []
    for file in files:
        prompts = read_prompts(file)
        lines = [line for line in file.read_text("utf-8-sig").split("\n") if line.strip()]
        for line, prompt in zip(lines, prompts, strict=True):
            kind = json.loads(line).get("kind") if len(files) == 1 else None
            found.append(Prompt(str(kind or file.stem), prompt))
    return found


def _links(text: str, profile: Profile) -> list[SweptLink]:
    from flowspec.testbed.grid import SweptLink

    name, _, values = text.partition("=")
    if name not in ("latency", "mbit"):
        raise ConfigError(f"--sweep is {text!r}; expected latency=MS,MS,... or mbit=N,N,...")
    numbers = _list(values, float, f"--sweep {name}", "latency=0,5,25 or mbit=10,100")
    try:
        if name == "latency":
            shapes = [replace(profile.link, latency=number / 1e3) for number in numbers]
        else:
            shapes = [replace(profile.link, bandwidth=number * 1e6 / 8) for number in numbers]
    except ConfigError:
        raise ConfigError(
            f"--sweep is {text!r}, but a link has a latency from 0 to 999999 ms and a bandwidth "
            "above 0 Mbit/s"
        ) from None
    return [SweptLink(name, shape) for shape in shapes if shape != profile.link]


def _draw(report: BenchReport, grid: Grid, folder: Path, suffix: str) -> None:
    """Every chart of the report, and a timeline of each strategy on the first prompt."""
    from flowspec.testbed import plots

    for name, draw in plots.charts(report):
        plots.save(draw(), folder / f"{name}{suffix}")
    plan = grid.plan
    rows = report.rows
    shown = [
        row
        for row in rows
        if (row.stages, row.temperature) == (plan.stages[0], plan.temperatures[0])
    ]
    seconds = _TIMELINE_TOKENS * max(row.tbt["mean"] for row in shown if not row.swept)
    counted: Counter[str] = Counter()
    for strategy in plan.runs:
        taken = plots.Timeline()
        prompt_rows = grid.follow(strategy, taken)
        title = f"{strategy}: {plan.profile.name}, simulated, T = {plan.temperatures[0]:g}"
        plain = strategy.partition(":")[0]
        counted[plain] += 1
        number = f"-{counted[plain]}" if counted[plain] > 1 else ""
        file = folder / f"timeline-{plain}{number}{suffix}"
        plots.save(plots.timeline(taken, prompt_rows, seconds, title), file)


def _list(text: str, kind: Callable[[str], T], flag: str, expected: str) -> tuple[T, ...]:
    try:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; expected {expected}") from None


def _counts(text: str) -> tuple[int, ...]:
    return _list(text, positive, "--stages", "counts of 1 or more, like 4,8")


def _temperature(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(text)
    return number


@contextmanager
def _progress() -> Iterator[Tell]:
    """A progress bar on stderr during the runs, if stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, of: progress.update(
            task, description=what, completed=done, total=of or None
        )
