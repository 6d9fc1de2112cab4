"""``flowspec bench`` and ``flowspec simulate``: strategies compared on a simulated cluster."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
from flowspec.cli.show import console
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ConfigError
from flowspec.rehearse.compare.prompts import Prompt, halve
from flowspec.rehearse.devices.profile import Profile
from flowspec.strategies import EXACT

if TYPE_CHECKING:
    from flowspec.rehearse.compare.grid import BenchPlan, SweptLink, Tell
    from flowspec.rehearse.compare.report import BenchReport

T = TypeVar("T")

DEFAULT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Options:
    """The flags of ``bench``, and of the comparisons in ``ops``; None: the default."""

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
    broker: str | None = None
    rows: str | None = None


def bench(options: Options) -> None:
    """Run the comparison; Markdown goes to stdout unless a file is given for it."""
    from flowspec.rehearse.compare.grid import Grid
    from flowspec.rehearse.compare.report import BenchReport, markdown

    check_places(options)
    plan = plan_of(options)
    notes.of_plan(plan)
    prompts = halve(prompts_in(options.prompts), options.half)
    with progress() as tell:
        grid = Grid(plan, prompts, tell)
        header = grid.header(command_line(), options.half)
        report = BenchReport(header, tuple(grid.run()))
    show(options, report, markdown(report))


def show(options: Options, report: BenchReport, text: str) -> None:
    """Write ``report`` and its Markdown, ``text``, where ``options`` says."""
    if options.out is not None:
        write("--out", options.out, report.text())
    if options.markdown is not None:
        write("--markdown", options.markdown, text)
    else:
        sys.stdout.write(text)


def command_line() -> str:
    """The command that was called, as a shell reads it."""
    return shlex.join(["flowspec", *sys.argv[1:]])


def plan_of(options: Options) -> BenchPlan:
    """The runs that ``options`` name."""
    from flowspec.rehearse.compare.grid import BenchPlan

    profile = _cluster(options.profile, options.broker, options.rows)
    return BenchPlan(
        profile,
        strategies_of(options.strategies),
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
    from flowspec.rehearse.devices.profiles import load

    profile = load(name)
    given = {"at": broker, "rows": rows}
    changed = {key: value for key, value in given.items() if value is not None}
    return replace(profile, way=replace(profile.way, **changed))


def check_places(options: Options) -> None:
    """ConfigError, before anything is computed, if a result could not be written."""
    files = {"--out": options.out, "--markdown": options.markdown}
    for flag, file in files.items():
        if file is not None:
            check_writable(flag, file)
    check_distinct(files)


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
    from flowspec.rehearse.compare.grid import BenchPlan, Grid
    from flowspec.rehearse.compare.naming import of_whom
    from flowspec.rehearse.compare.report import BenchReport, described, sentence

    if prompt is not None and prompts is not None:
        raise ConfigError("give either a PROMPT or --prompts FILE.jsonl, not both")
    if prompt is not None:
        JobSpec(prompt)  # raises if the prompt is invalid
    cluster = _cluster(profile, broker, rows)
    count = cluster.stages[0] if stages is None else stages
    plan = BenchPlan(cluster, (strategy,), (draft,), (temperature,), (count,), max_new_tokens, seed)
    notes.of_plan(plan)
    asked = [Prompt("prompt", prompt)] if prompt is not None else prompts_in(prompts)
    with progress() as tell:
        grid = Grid(plan, asked, tell)
        row = next(row for row in grid.run() if row.strategy == strategy)
    if as_json:
        sys.stdout.write(BenchReport(grid.header(command_line(), "all"), (row,)).text())
        return
    shown = console()
    shown.print(
        f"Simulated: {cluster.name}, {count} stages: {cluster.summary}.\n"
        f"Source: {cluster.source}. {sentence(str(cluster.way))}\n"
        f"Acceptance is that of {of_whom(cluster)}.",
        markup=False,
    )
    for name, value in described(row):
        shown.print(f"{name + '  ':<50}{value}", markup=False)


def compare(old: Path, new: Path) -> None:
    """Print the changes between two files that ``bench`` wrote."""
    from flowspec.rehearse.compare.report import compare

    sys.stdout.write(compare(old, new))


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
    from flowspec.rehearse.compare import grid

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
    from flowspec.rehearse.compare.grid import SweptLink

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
def progress() -> Iterator[Tell]:
    """A progress bar on stderr during the runs, if stderr is a terminal."""
    screen = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, of: progress.update(
            task, description=what, completed=done, total=of or None
        )
