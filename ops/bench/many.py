"""Many jobs at once in simulation: tokens per second beside micro-batched plain decoding.

    python -m ops.bench.many [--profiles rtx3090-70b,jetson-7b,a100-70b] [--jobs 1,2,4,8,16,64]
                             [--temperatures 0,1] [--tokens 64] [--prompts FILE]
                             [--open 0.4,0.7,0.9]

Closed loops of so many jobs (``ops/bench/loops.py``); without ``--jobs`` those that have a goal,
and eight jobs of one text at once. With ``--open`` Poisson arrivals instead, at shares of the rate
of ``auto`` at eight jobs. Stages and drafts take a profile's times, on its first number
of stages. The target's tokens are random, and an oracle drafts them as often as the packaged head
finds those of the packaged target, on the prompts of FILE whose greedy text does not repeat itself:
positions in three groups by the head's confidence, each with its hit rate by rank. For T = 1 those
are the ranks of coupled drafts at temperature 1; the job itself is greedy. Prints Markdown.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec.cli.generate import read_prompts
from flowspec.core.job.load import Governor
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.share import RunShare
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import FlowSpecError
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import PACKAGED_HEAD, default_pair, open_directory
from flowspec.rehearse.compare.grid import LOOP
from flowspec.rehearse.compare.hits import HitDrafter, Kind
from flowspec.rehearse.compare.simulate import profile_costs
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load
from ops.bench.arguments import count, counts, temperatures
from ops.bench.loops import LEAST_JOBS, ROUNDS, Loop, LoopFigures, LoopSetup, job_names, jobs_of
from ops.parser import Parser

PROFILES = "rtx3090-70b,jetson-7b,a100-70b"
PROMPTS = Path(__file__).parents[2] / "tests" / "data" / "prompts.jsonl"
SOURCE = "head"
VOCABULARY = 4096
#: Ranks of the head's candidates that are told apart.
RANKS = 32
#: Groups of positions by the head's confidence.
GROUPS = 3


class Unbatched(Governor):
    """A pass for each job, as SpecPipe alone has it: one request per pipeline step."""

    def changes(self, runs: Mapping[RunKey, bool]) -> dict[RunKey, RunShare]:
        before = self._given
        self._given = dict.fromkeys(runs, RunShare(together=1))
        return {run: share for run, share in self._given.items() if run not in before}


@dataclass(frozen=True, slots=True)
class Served:
    """A way to serve jobs; ``jobs``: the loops it is measured in, empty: all."""

    name: str
    strategy: str
    unbatched: bool = False
    jobs: tuple[int, ...] = ()

    def governor(self, profile: Profile) -> Governor | None:
        return Unbatched(profile.stages[0]) if self.unbatched else None


#: What is compared, plain decoding first: it has the best batches, as the governor finds them.
WAYS = (
    Served("plain", "autoregressive"),
    Served("auto", "auto"),
    Served("specpipe_db", "specpipe_db"),
    Served("specpipe, unbatched", "specpipe", unbatched=True, jobs=(8,)),
)
#: The goals for ``auto`` over plain decoding, by profile, temperature and jobs.
GOALS: Mapping[tuple[str, float, int], float] = {
    **{("rtx3090-70b", 0, n): x for n, x in ((1, 4.2), (2, 3.8), (4, 3.4), (8, 2.8), (16, 2.2))},
    **{("rtx3090-70b", 1, n): x for n, x in ((1, 3.0), (2, 2.7), (4, 2.4), (8, 2.0), (16, 1.7))},
    **{("jetson-7b", 0, n): x for n, x in ((1, 4.0), (4, 2.8), (8, 2.4), (16, 2.1))},
    **{("a100-70b", 0, n): x for n, x in ((1, 1.5), (4, 0.95), (8, 1.4), (16, 2.0))},
}
#: The number of jobs at which hardly a row is free, and the goal there at T = 0.
CROWD, LEAST = 64, 0.97
#: Jobs of one text, and of an open loop.
EQUAL, OPEN = 8, 32


def goals(profile: str, temperature: float) -> dict[int, float]:
    """The goals by the number of jobs."""
    known = {n: goal for (name, t, n), goal in GOALS.items() if (name, t) == (profile, temperature)}
    return {**known, **({CROWD: LEAST} if temperature == 0 else {})}


@dataclass(frozen=True, slots=True)
class LoopGrid:
    """What to run; ``jobs``: empty: those with a goal; ``kinds``: of the oracle, by temperature."""

    profiles: Sequence[Profile]
    jobs: Sequence[int]
    kinds: Mapping[float, Sequence[Kind]]
    lengths: Sequence[int]
    tokens: int
    shares: Sequence[float] = ()


def kinds_of(found: Sequence[Text], head: DraftExecutor, *, coupled: bool) -> list[Kind]:
    """How often each rank of ``head`` is right on texts, by its confidence.

    Every position is drafted from the target's true rows, as the first level of a tree.
    """
    ranks = []
    sure = []
    for number, text in enumerate(found):
        run = RunKey(f"j{number}", 1)
        tokens = (*text.prompt, *text.output)
        ids = tuple(range(len(tokens)))
        head.allocate(run, 4 * len(ids), text.sampling, Returns(hidden=True))
        head.learn(run, ids, np.asarray(text.hidden)[: len(ids)])
        asked = tuple(range(len(text.prompt) - 1, len(ids) - 1))
        above = tuple(at - 1 for at in ids)
        part = Part(run, -1, ids, above, ids, tokens, (), len(ids), None, asked)
        done = head.run(Draft(part, RANKS, coupled=coupled))
        head.release(run)
        for at, proposed, values in zip(asked, done.tokens, done.values, strict=True):
            truth = tokens[at + 1]
            ranks.append(proposed.index(truth) if truth in proposed else RANKS)
            sure.append(values[0] - values[1] if coupled else values[0])
    order = np.argsort(-np.array(sure), kind="stable")
    return [_kind(np.array(ranks)[group], len(order)) for group in np.array_split(order, GROUPS)]


def _kind(ranks: np.ndarray, of: int) -> Kind:
    hits = np.bincount(ranks, minlength=RANKS + 1)[:RANKS] / len(ranks)
    return Kind(tuple(np.sort(hits)[::-1].tolist()), len(ranks) / of)


def fitted(
    prompts: Sequence[str], wanted: Sequence[float], tokens: int
) -> tuple[dict[float, list[Kind]], list[int]]:
    """The oracle's kinds by temperature, and the lengths of the prompts in tokens."""
    target = open_directory(default_pair()[0])
    head = load_sources(PACKAGED_HEAD, target)
    kinds = {}
    lengths: list[int] = []
    greedy = texts(prompts, [Sampling()], tokens, target)
    kept = [
        prompt
        for prompt, text in zip(prompts, greedy, strict=True)
        if repeated_4grams(text.output) < LOOP
    ]
    for temperature in wanted:
        sampling = Sampling(temperature, seed=1)
        found = texts(kept, [sampling], tokens, target, hidden=True)
        kinds[temperature] = kinds_of(found, head, coupled=temperature > 0)
        lengths = [len(text.prompt) for text in found]
    return kinds, lengths


def random_texts(lengths: Sequence[int], tokens: int, jobs: int) -> list[Text]:
    """Texts of ``tokens`` random tokens, for prompts of ``lengths`` in turn."""
    drawn = random.Random(1)

    def random_tokens(length: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(VOCABULARY) for _ in range(length))

    return [
        Text(random_tokens(lengths[at % len(lengths)]), random_tokens(tokens), Sampling())
        for at in range(jobs)
    ]


def pipeline_of(profile: Profile, served: Sequence[Text], kinds: Sequence[Kind]) -> LoopSetup:
    """A pipeline of ``profile``'s first number of stages, whose drafter knows ``served``."""
    sequences = {
        name: (*text.prompt, *text.output)
        for name, text in zip(job_names(len(served)), served, strict=True)
    }
    stages = profile.stages[0]
    drafter = HitDrafter(sequences, kinds, VOCABULARY, wants_hidden=False)
    limits = Limits(stages, 1 << 14, VOCABULARY, frozenset())
    return LoopSetup(limits, profile_costs(profile, stages, SOURCE, hidden=True), drafter, served)


def setup(grid: LoopGrid, profile: Profile, temperature: float, jobs: int) -> LoopSetup:
    """A pipeline for ``jobs`` jobs with random texts."""
    served = random_texts(grid.lengths, grid.tokens, jobs)
    return pipeline_of(profile, served, grid.kinds[temperature])


def plain_rate(profile: Profile, jobs: int) -> float:
    """Tokens per second of the best micro-batched plain decoding.

    Of m rows in a pass, at the best m: min(m / t(m), jobs / (the passes of all stages over m)).
    Prompts take no time.
    """
    stages = profile.stages[0]

    def rate(size: int) -> float:
        times = [profile.stage_seconds(stage, stages, size) for stage in range(1, stages + 1)]
        return min(size / max(times), jobs / sum(times))

    return max(map(rate, range(1, jobs + 1)))


def closed(grid: LoopGrid) -> Iterator[str]:
    """A table per profile and temperature."""
    for profile, temperature in itertools.product(grid.profiles, grid.kinds):
        wanted = goals(profile.name, temperature)
        counted = grid.jobs or list(wanted)
        if counted:
            yield f"\n`{profile.name}`, {profile.stages[0]} stages, T = {temperature:g}\n"
            yield (
                "| jobs | way | tokens/s | over plain | goal | over computed plain | TBT mean, ms "
                "| p99 over jobs | gap p99 | hit rate |"
            )
            yield "|---|---|---|---|---|---|---|---|---|---|"
        for jobs in counted:
            rate = 0.0
            for way in WAYS:
                if way.jobs and jobs not in way.jobs:
                    continue
                found = _measured(grid, profile, temperature, way, jobs)
                rate = rate or found.tokens_per_second
                shown = f"{wanted[jobs]:g}" if jobs in wanted and way.strategy == "auto" else ""
                computed = plain_rate(profile, jobs)
                yield f"| {jobs} | {way.name} | {_cells(found, rate, shown, computed)} |"


def equal(grid: LoopGrid) -> Iterator[str]:
    """Jobs of one text, submitted at once: the slowest beside the mean."""
    yield f"\n{EQUAL} jobs of one text at once, T = 0: mean TBT, and the slowest job's over it\n"
    yield "| profile | " + " | ".join(f"{way.name}, ms | slowest" for way in WAYS[:3]) + " |"
    yield "|---|" + 6 * "---|"
    for profile in grid.profiles:
        cells = []
        for way in WAYS[:3]:
            (text,) = random_texts(grid.lengths, grid.tokens, 1)
            pipeline = pipeline_of(profile, [text] * EQUAL, grid.kinds[0.0])
            at_once = dict.fromkeys(job_names(EQUAL), 0.0)
            records = Loop(pipeline, way.strategy).submitted(at_once).values()
            spans = [one.committed_at[-1][0] - one.committed_at[0][0] for one in records]
            tbt = np.array(spans) / (grid.tokens - 1)
            cells.append(f"{tbt.mean() * 1e3:.0f} | {tbt.max() / tbt.mean():.2f}")
        yield f"| {profile.name} | {' | '.join(cells)} |"


def _measured(
    grid: LoopGrid, profile: Profile, temperature: float, way: Served, jobs: int
) -> LoopFigures:
    pipeline = setup(grid, profile, temperature, jobs_of(jobs))
    return Loop(pipeline, way.strategy, way.governor(profile)).closed(jobs)


def _cells(found: LoopFigures, rate: float, goal: str, computed: float) -> str:
    times = (found.tbt, found.tbt_p99, found.gap_p99)
    milliseconds = " | ".join(f"{seconds * 1e3:.0f}" for seconds in times)
    speed = found.tokens_per_second
    over = f"{speed / rate:.2f} | {goal} | {speed / computed:.2f}"
    return f"{speed:.1f} | {over} | {milliseconds} | {found.hit_rate:.2f}"


def opened(grid: LoopGrid) -> Iterator[str]:
    """Poisson arrivals at shares of the rate of eight jobs at once."""
    yield "\nPoisson arrivals, T = 0\n"
    yield "| profile | of auto's rate at 8 | way | tokens/s | TBT mean, ms | p99 | gap p99 | TTFT |"
    yield "|---|---|---|---|---|---|---|---|"
    for profile in grid.profiles:
        full = Loop(setup(grid, profile, 0.0, jobs_of(8)), "auto").closed(8).tokens_per_second
        for share in grid.shares:
            for way in WAYS[:3]:
                pipeline = setup(grid, profile, 0.0, OPEN)
                found = Loop(pipeline, way.strategy).opened(OPEN, share * full / grid.tokens)
                times = (found.tbt, found.tbt_p99, found.gap_p99, found.ttft)
                shown = " | ".join(f"{seconds * 1e3:.0f}" for seconds in times)
                speed = f"{found.tokens_per_second:.1f}"
                yield f"| {profile.name} | {share:g} | {way.name} | {speed} | {shown} |"


def tables(grid: LoopGrid) -> Iterator[str]:
    """The lines of all tables that are asked for."""
    if grid.shares:
        yield from opened(grid)
        return
    yield from closed(grid)
    if not grid.jobs:
        yield from equal(grid)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.many", description=__doc__)
    add = parser.add_argument
    add("--profiles", default=PROFILES, help=f"by commas ({PROFILES})")
    add("--jobs", type=counts, default=[], help="at once (those with a goal)")
    add("--temperatures", type=temperatures, default=[0.0, 1.0], help="by commas (0,1)")
    add("--tokens", type=count, default=64, help="of every text (64)")
    add("--prompts", type=Path, default=PROMPTS, help="a .jsonl file (that of the tests)")
    add("--open", type=temperatures, default=[], help="shares of the rate, for Poisson arrivals")
    options = parser.parse_args(arguments)
    try:
        profiles = [load(name) for name in options.profiles.split(",")]
        prompts = read_prompts(options.prompts)
        kinds, lengths = fitted(prompts, options.temperatures, options.tokens)
        grid = LoopGrid(profiles, options.jobs, kinds, lengths, options.tokens, options.open)
        print(
            f"Texts of {options.tokens} tokens, prompts of {min(lengths)} to {max(lengths)}; a "
            f"loop of n jobs at once serves n + max({LEAST_JOBS}, {ROUNDS} n) in all.\n"
        )
        for temperature, its in kinds.items():
            firsts = ", ".join(f"{kind.rates[0]:.2f}" for kind in its)
            print(f"Oracle for T = {temperature:g}: right at the first rank {firsts}", flush=True)
        for line in tables(grid):
            print(line, flush=True)
    except FlowSpecError as error:
        sys.exit(f"many: {error}")


if __name__ == "__main__":
    main()
