"""Simulated grid of strategies, draft sources, temperatures and stage counts on one profile.

The target's texts are computed once (``texts``), a drafter's proposals once per text (``memo``);
all strategies run the same prompts one after another. The virtual clock gives the same seconds
every time, so nothing is repeated: only the prompt varies, and intervals are over prompts.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from flowspec.core.job.draft_worker import Build
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, StageExecutor
from flowspec.model.drafters.kinds import NGRAM
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import PACKAGED_HEAD, all_tensors, fetch_weights
from flowspec.rehearse.compare.digests import digest, machine, model_digest, profile_digest
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.naming import (
    canonical,
    choices_of,
    drafter_of,
    first_choice,
    models_of,
    names_of,
    of_whom,
)
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.compare.report import Estimate, ReportRow, measured
from flowspec.rehearse.compare.simulate import Ran, profile_costs, returns_hidden, simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import LinkShape, Profile
from flowspec.rehearse.simulator import Tap
from flowspec.strategies import build

#: The packaged model between drafter and target, if the profile has times for one.
MIDDLE = "medium"
#: A greedy text with at least this share of repeated 4-grams counts as a loop.
LOOP = 0.3

Tell = Callable[[str, int, int], None]
"""The current work, the number done, and the total (0: unknown)."""


@dataclass(frozen=True, slots=True)
class SweptLink:
    """Links to simulate; ``swept``: ``latency``, ``mbit``, or "" for the profile's own links."""

    swept: str
    shape: LinkShape


@dataclass(frozen=True)
class BenchPlan:
    """What to run; ConfigError for a plan that cannot be run.

    ``sources``: profile names of drafters, joined by + for hybrids and by : for choices; a
    strategy that does not choose uses the first. ``links``: further links. ``no_loops``: leave out
    prompts whose greedy text repeats itself.
    """

    profile: Profile
    strategies: tuple[str, ...]
    sources: tuple[str, ...] = ("slm",)
    temperatures: tuple[float, ...] = (0.0,)
    stages: tuple[int, ...] = (4,)
    tokens: int = 48
    seed: int = 1
    baseline: str = "autoregressive"
    links: tuple[SweptLink, ...] = ()
    no_loops: bool = False

    def __post_init__(self) -> None:
        if not (self.strategies and self.sources and self.temperatures and self.stages):
            raise ConfigError(
                "nothing to run; "
                "expected a strategy, a draft source, a temperature and a stage count"
            )
        if self.tokens < 2:
            raise ConfigError(f"tokens is {self.tokens}; expected 2 or more")
        if min(self.stages) < 1:
            raise ConfigError(f"stages is {list(self.stages)}; expected counts of 1 or more")
        for temperature in self.temperatures:
            Sampling(temperature, seed=self.seed)
        for source in self.sources:
            self.profile.check_source(canonical(source))
            drafter_of(source, models_of(self.profile))
        self.profile.way.check(min(self.stages))
        widths = {
            name: max(build(name, stages).draft_width for stages in self.stages)
            for name in self.runs
        }
        plain = [name for name in self.strategies if not widths[name]]
        if widths[self.baseline] and plain:
            raise ConfigError(
                f"{plain[0]} drafts nothing and has no draft source in common with the baseline "
                f"{self.baseline}; expected a baseline that drafts nothing either, "
                "like autoregressive"
            )

    @property
    def runs(self) -> tuple[str, ...]:
        """Every strategy once, the baseline first."""
        return tuple(dict.fromkeys((self.baseline, *self.strategies)))


@dataclass(frozen=True, slots=True)
class Case:
    """Prompt number ``number`` at a temperature."""

    number: int
    temperature: float
    text: Text


@dataclass(frozen=True, slots=True)
class Cell:
    """The report row to which a run belongs."""

    strategy: str
    source: str
    stages: int
    temperature: float
    link: SweptLink


class Grid:
    """A plan over ``prompts``; ``cases`` are those that are run.

    ``loops``, ``too_long`` and ``too_short`` count the prompts whose text repeats itself, that
    leave no room for the tokens, and whose text ends at once.
    """

    def __init__(
        self, plan: BenchPlan, prompts: Sequence[Prompt], tell: Tell = lambda what, done, of: None
    ) -> None:
        self.plan = plan
        self.tell = tell
        self._models = models_of(plan.profile)
        self._target = fetch_weights(self._models["target"], all_tensors)
        self._drafters: dict[str, DraftExecutor] = {}
        self._memos: list[MemoDrafter] = []
        self._known: dict[Cell, History] = {}
        self.prompts = self._fitting(prompts)
        self.too_long = len(prompts) - len(self.prompts)
        self.loops = self.too_short = 0
        self.cases = self._cases()

    def run(self, cells: Mapping[Cell, str] | None = None) -> list[ReportRow]:
        """All rows, each after its baseline's; ConfigError if no prompt is left.

        ``cells``: what to run, with the draft source of each; None: all of the plan.
        """
        (rows,) = run_together([(self, self.cells() if cells is None else cells)])
        return rows

    def on(self, profile: Profile) -> Grid:
        """This plan on ``profile``'s links and first stage count.

        The grids share prompts, texts and drafters, so what one of them drafts the others know.
        ConfigError for a profile of other models, whose text and acceptance that would not be.
        """
        if models_of(profile) != self._models:
            raise ConfigError(
                f"profile {profile.name} is of {of_whom(profile)}, and profile "
                f"{self.plan.profile.name} of {of_whom(self.plan.profile)}; run each by itself"
            )
        other = copy.copy(self)
        other.plan = replace(self.plan, profile=profile, stages=profile.stages[:1], links=())
        other._known = {}
        return other

    def check_cases(self) -> None:
        """ConfigError if no prompt is left."""
        if not self.cases:
            raise ConfigError(
                "no prompt is left to run: all are too long, end at once or repeat themselves"
            )

    def forget_drafts(self) -> None:
        """Drop the drafters' remembered proposals."""
        for memo in self._memos:
            memo.forget()

    def header(self, command: str, half: str) -> dict[str, Any]:
        """The report header for these runs; ``half``: the half of the prompts they use."""
        plan = self.plan
        line = machine()
        used = [self.prompts[number] for number in sorted({case.number for case in self.cases})]
        names = dict.fromkeys(
            name for source in plan.sources for name in names_of(canonical(source))
        )
        drafts = {name: model_digest(self._models[name]) for name in names if name != NGRAM}
        said = {
            "digest": digest([[prompt.set, prompt.text] for prompt in used]),
            "count": len(used),
            "half": half,
            "sets": {str(case.number): self.prompts[case.number].set for case in self.cases},
            "loops": self.loops,
            "no_loops": plan.no_loops,
            "too_long": self.too_long,
            "too_short": self.too_short,
        }
        profile = {name: getattr(plan.profile, name) for name in ("name", "summary", "source")}
        return {
            "how": "simulated",
            "target": model_digest(self._models["target"]),
            "drafts": drafts,
            "prompts": said,
            "profile": {
                **profile,
                "way": str(plan.profile.way),
                "models": of_whom(plan.profile),
                "digest": profile_digest(plan.profile),
            },
            "temperatures": plan.temperatures,
            "tokens": plan.tokens,
            "seed": plan.seed,
            "baseline": plan.baseline,
            "version": version("flowspec"),
            "machine": {"line": line, "digest": digest(line)},
            "command": command,
        }

    def trace(self, case: Case, cell: Cell, source: str, tap: Tap | None = None) -> Ran:
        """One run; ``tap`` is called with every step of its machines.

        It starts with the history of the earlier runs in the cell, the first one with that of an
        unmeasured run of the last prompt, unless it is that prompt's.
        """
        if cell not in self._known:
            self._known[cell] = self.warmed(cell, source, case)
        return self.simulate(case, cell, source, self._known[cell], tap)

    def warmed(self, cell: Cell, source: str, first: Case) -> History:
        """The history that the cell's first measured run, of ``first``, begins with."""
        history = History()
        last = self.cases_at(cell.temperature)[-1]
        if last.number != first.number:
            self.simulate(last, cell, source, history)
        return history

    def cases_at(self, temperature: float) -> list[Case]:
        """The cases at ``temperature``, in the order in which they are run."""
        return [case for case in self.cases if case.temperature == temperature]

    def simulate(
        self,
        case: Case,
        cell: Cell,
        source: str,
        history: History,
        tap: Tap | None = None,
        make: Build = build,
    ) -> Ran:
        """One run that begins with ``history`` and adds to it.

        ``make``: gives the strategy of the cell's text, which need not be a registered one.
        """
        drafter = self._drafter(source)
        strategy = make(cell.strategy, cell.stages)
        profile = replace(self.plan.profile, link=cell.link.shape)
        costs = profile_costs(
            profile, cell.stages, source, hidden=returns_hidden(drafter, strategy)
        )
        middles = (
            {MIDDLE: lambda: self._middle} if strategy.uses_middles and profile.middles else None
        )
        return simulate(
            case.text,
            cell.strategy,
            cell.stages,
            self._target,
            drafter,
            costs,
            middles,
            tap,
            history,
            make,
        )

    def follow(self, strategy: str, tap: Tap) -> int:
        """Run the first prompt with the first temperature, stage count and source.

        ``tap`` is called with every step. Returns the number of rows of the prompt.
        """
        plan = self.plan
        source = canonical(self.plan.sources[0])
        case = next(case for case in self.cases if case.temperature == plan.temperatures[0])
        self.trace(
            case,
            Cell(
                strategy, source, plan.stages[0], case.temperature, SweptLink("", plan.profile.link)
            ),
            source,
            tap,
        )
        return len(case.text.prompt)

    def cells(self) -> dict[Cell, str]:
        """Every cell once, with the first source that yields it.

        A strategy that does not choose has one cell for all sources with the same first choice; a
        strategy that drafts nothing has one for all sources.
        """
        plan = self.plan
        found = dict[Cell, str]()
        links = (SweptLink("", plan.profile.link), *plan.links)
        sources = map(canonical, plan.sources)
        for source, temperature, link, stages, name in itertools.product(
            sources, plan.temperatures, links, plan.stages, plan.runs
        ):
            strategy = build(name, stages)
            chain = f",{MIDDLE}" if strategy.uses_middles and plan.profile.middles else ""
            drafts = source if strategy.chooses_drafter else first_choice(source)
            shown = drafts + chain if strategy.draft_width else "-"
            found.setdefault(Cell(name, shown, stages, temperature, link), source)
        return found

    def _fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        from flowspec.model.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(self._target)
        room = self._target.context - self.plan.tokens
        return [
            prompt for prompt in prompts if len(tokenizer.encode(prompt.text, raw=False)) <= room
        ]

    def _cases(self) -> list[Case]:
        plan = self.plan
        count = len(self.prompts)
        self.tell(f"what the target says to {count} prompts", 0, 0)
        hidden = any("head" in names_of(source) for source in plan.sources)
        greedy = dict(enumerate(self._said(range(count), 0.0, hidden=hidden)))
        looping = {at for at, text in greedy.items() if repeated_4grams(text.output) >= LOOP}
        self.loops = len(looping)
        kept = [at for at in greedy if not (plan.no_loops and at in looping)]
        found = {0.0: [greedy[at] for at in kept]}
        for temperature in plan.temperatures:
            if temperature:
                found[temperature] = self._said(kept, temperature, hidden=hidden)
        cases = [
            Case(number, temperature, text)
            for temperature, said in found.items()
            if temperature in plan.temperatures
            for number, text in zip(kept, said, strict=True)
        ]
        short = {case.number for case in cases if len(case.text.output) < 2}
        self.too_short = len(short)
        return [case for case in cases if case.number not in short]

    def _said(self, numbers: Iterable[int], temperature: float, *, hidden: bool) -> list[Text]:
        """The target's texts for the prompts ``numbers``."""
        return texts(
            [self.prompts[number].text for number in numbers],
            [Sampling(temperature, seed=self.plan.seed)],
            self.plan.tokens,
            self._target,
            hidden=hidden,
            head=self._models.get("head", PACKAGED_HEAD),
        )

    def _drafter(self, source: str) -> DraftExecutor:
        if source not in self._drafters:
            self._drafters[source] = load_sources(
                drafter_of(source, self._models), self._target, self._remembering
            )
        return self._drafters[source]

    def _remembering(self, drafter: DraftExecutor) -> MemoDrafter:
        self._memos.append(MemoDrafter(drafter))
        return self._memos[-1]

    @cached_property
    def _middle(self) -> StageExecutor:
        from flowspec.model.stage import load_stage

        directory = fetch_weights(self._models[MIDDLE], all_tensors)
        return load_stage(directory, range(directory.layers))

    def _row(self, cell: Cell, runs: Mapping[int, Ran]) -> ReportRow:
        link = cell.link
        return ReportRow(
            cell.strategy,
            cell.source,
            cell.stages,
            cell.temperature,
            link.swept,
            link.shape.latency * 1e3,
            link.shape.bandwidth * 8 / 1e6,
            **measured(runs, choices_of(cell.source)),
        )

    def rows(self, found: Mapping[Cell, Mapping[int, Ran]]) -> list[ReportRow]:
        """The rows of runs by cell and prompt number, each after its baseline's."""
        return self._compared([self._row(cell, found[cell]) for cell in found])

    def forget_runs(self) -> None:
        """Drop what earlier runs have taught every cell."""
        self._known.clear()

    def _compared(self, rows: Iterable[ReportRow]) -> list[ReportRow]:
        """``rows`` with their speedup over the baseline.

        That is the baseline with the same source, else with the same first choice, else without
        drafts.
        """
        rows = list(rows)
        bases = {place(row): row for row in rows if row.strategy == self.plan.baseline}
        for row in list(bases.values()):
            bases.setdefault(place(replace(row, source=first_choice(row.source))), row)
        found = []
        for row in rows:
            like = (row.source, first_choice(row.source), "-")
            base = next(
                base for source in like if (base := bases.get(place(replace(row, source=source))))
            )
            ratios = {
                at: speed / base.speeds[at] for at, speed in row.speeds.items() if at in base.speeds
            }
            found.append(replace(row, speedup=Estimate.of(list(ratios.values())), speedups=ratios))
        return sorted(
            found,
            key=lambda row: (row.temperature, row.swept, row.latency_ms, row.mbit, row.stages),
        )


def run_together(runs: Sequence[tuple[Grid, Mapping[Cell, str]]]) -> list[list[ReportRow]]:
    """The rows of grids that share their prompts and drafters (``Grid.on``), as ``Grid.run``.

    A prompt's runs follow each other over all grids, so that each of its nodes is drafted once.
    """
    first = runs[0][0]
    first.check_cases()
    for grid, _ in runs:
        grid.forget_runs()
    found: list[dict[Cell, dict[int, Ran]]] = [defaultdict(dict) for _ in runs]
    todo = [
        (at, cell, source) for at, (_, cells) in enumerate(runs) for cell, source in cells.items()
    ]
    done = 0
    total = sum(cell.temperature == case.temperature for _, cell, _ in todo for case in first.cases)
    for source in dict.fromkeys(its for _, _, its in todo):
        for case in first.cases:
            for at, cell, its in todo:
                if its == source and cell.temperature == case.temperature:
                    first.tell(f"{cell.strategy} with {source}", done, total)
                    found[at][cell][case.number] = runs[at][0].trace(case, cell, source)
                    done += 1
            first.forget_drafts()
    return [grid.rows(its) for (grid, _), its in zip(runs, found, strict=True)]


def place(row: ReportRow) -> tuple[object, ...]:
    """The key that is equal for rows that differ only in their strategy."""
    source = row.source.partition(",")[0]
    return (source, row.stages, row.temperature, row.swept, row.latency_ms, row.mbit)
