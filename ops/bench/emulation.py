"""Simulation against real workers on emulated devices: same profile, strategies and prompts.

    python -m ops.bench.emulation [--profiles jetson-7b,rtx3090-70b] [--stages N,...]
                                  [--strategies a,b,...] [--temperatures 0,1]
                                  [--draft slm|head|...] [--tokens 24] [--count 2]
                                  [--stretch X] [--free] [--ratios]

Emulated workers are real processes over Redis; their software is charged unless ``--free``. One
cluster per profile and stage count serves all strategies. ``over simulated``: time between tokens
relative to the simulator's, which charges no software. A run in which more than 1 percent of the
inputs arrived after an event that they could have changed is marked (refused): its figures are
printed but invalid. ``--ratios``: print only ``over simulated``, one column per profile, stage
count and temperature. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.cli.bench import strategies_of
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.plan.predict import token_seconds
from flowspec.rehearse.compare.naming import canonical, drafter_of
from flowspec.rehearse.compare.simulate import profile_costs, returns_hidden, simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import EXACT, build
from ops.bench.emulate import OVERTAKEN_SHARE, EmulatedCluster, probe
from ops.bench.simulated import PROMPTS
from ops.bench.systems import chosen_prompts, show

COLUMNS = (
    "strategy",
    "profile",
    "stages",
    "T",
    "emulated, ms",
    "simulated, ms",
    "over simulated",
    "overtaken",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One strategy on one cluster: its row of the table, and its cell in the ratio table."""

    strategy: str
    cluster: str
    row: str
    ratio: str


def simulated(
    found: Sequence[Text],
    strategy: str,
    profile: Profile,
    stages: int,
    source: str,
    known: History,
) -> float:
    """Seconds between tokens by the simulator, on a cluster that has ``known``."""
    target = open_directory(default_pair()[0])
    drafter = load_sources(drafter_of(source), target)
    costs = profile_costs(
        profile, stages, source, hidden=returns_hidden(drafter, build(strategy, stages))
    )
    runs = [
        simulate(text, strategy, stages, target, drafter, costs, history=known) for text in found
    ]
    return token_seconds(runs)


def compare(
    found: Mapping[float, Sequence[Text]],
    strategies: Sequence[str],
    profile: Profile,
    stages: int,
    stretch: float,
    *,
    source: str,
    free: bool,
) -> Iterator[Comparison]:
    """Yield each strategy's comparison when it has run. ``found``: texts by temperature."""
    models = (default_pair()[0], drafter_of(source))
    with EmulatedCluster(
        profile, stages, models=models, source=source, stretch=stretch, free_software=free
    ) as cluster:
        known = History()  # kept across texts, as the emulated cluster does
        for temperature, strategy in itertools.product(found, strategies):
            column = f"{profile.name}, {stages}, T = {temperature:g}"
            cell = f"| {strategy} | {profile.name} | {stages} | {temperature:g}"
            try:
                done = cluster.run_all(found[temperature], strategy)
            except FlowSpecError as error:
                yield Comparison(strategy, column, f"{cell} | {error} | | | |", "failed")
                continue
            ours = token_seconds(done.runs)
            model = simulated(found[temperature], strategy, profile, stages, source, known)
            share = done.counts.overtaken / max(1, done.counts.inputs)
            mark = " (refused)" if share > OVERTAKEN_SHARE else ""
            ratio = f"{ours / model:.3f}"
            times = f"{ours * 1e3:.2f} | {model * 1e3:.2f} | {ratio} | {share:.2%}{mark}"
            yield Comparison(strategy, column, f"{cell} | {times} |", ratio + mark)


def ratio_table(found: Sequence[Comparison]) -> list[str]:
    """A row per strategy, a column per cluster and temperature."""
    cells = {(one.strategy, one.cluster): one.ratio for one in found}
    strategies, columns = (dict.fromkeys(keys) for keys in zip(*cells, strict=True))
    rows = (
        f"| {strategy} | {' | '.join(cells[strategy, column] for column in columns)} |"
        for strategy in strategies
    )
    return [f"| strategy | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|", *rows]


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profiles", default="jetson-7b", help="comma-separated (jetson-7b)")
    parser.add_argument("--stages", default="", help="comma-separated; default: a profile's first")
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="comma-separated; default: every exact one"
    )
    parser.add_argument("--temperatures", default="0", help="comma-separated (0)")
    parser.add_argument(
        "--draft", default="slm", help="slm, head or ngram, several by + or : (slm)"
    )
    parser.add_argument("--tokens", type=int, default=24, help="tokens per text (24)")
    parser.add_argument("--count", type=int, default=2, help="prompts, of six kinds in turn (2)")
    parser.add_argument("--stretch", type=float, default=0.0, help="default: from a probe")
    parser.add_argument("--free", action="store_true", help="charge no software")
    parser.add_argument("--ratios", action="store_true", help="print only over simulated")
    try:
        run(parser.parse_args())
    except FlowSpecError as error:
        sys.exit(f"flowspec: {error}")


def prompts_in_turn(count: int) -> list[str]:
    """``count`` of the packaged prompts, of their kinds in turn."""
    every = chosen_prompts(PROMPTS, sys.maxsize)
    kinds = len(chosen_prompts(PROMPTS, 1))
    if not 1 <= count <= len(every):
        raise ConfigError(f"--count is {count}; expected 1 to {len(every)} prompts")
    each = len(every) // kinds
    return [prompt for at in range(each) for prompt in every[at::each]][:count]


def run(given: argparse.Namespace) -> None:
    """Print the whole table; ConfigError before the first run if any run is impossible."""
    strategies = strategies_of([given.strategies])
    profiles = [load(name) for name in given.profiles.split(",")]
    source = canonical(given.draft)
    hidden = "head" in given.draft
    models = (default_pair()[0], drafter_of(source))
    for strategy, profile in itertools.product(strategies, profiles):
        build(strategy, 1)
        profile.check_source(source)
    target = open_directory(default_pair()[0])
    prompts = prompts_in_turn(given.count)
    found = {
        float(t): texts(
            prompts, [Sampling(temperature=float(t), seed=1)], given.tokens, target, hidden=hidden
        )
        for t in given.temperatures.split(",")
    }
    if not given.ratios:
        show(f"| {' | '.join(COLUMNS)} |")
        show("|---|---|---|---|---|---|---|---|")
    compared: list[Comparison] = []
    for profile in profiles:
        for stages in map(int, given.stages.split(",")) if given.stages else profile.stages[:1]:
            stretch = given.stretch or probe(
                next(iter(found.values()))[0],
                "specpipe",
                profile,
                stages,
                models=models,
                source=source,
                free_software=given.free,
            )
            for one in compare(
                found, strategies, profile, stages, stretch, source=source, free=given.free
            ):
                compared.append(one)
                if not given.ratios:
                    show(one.row)
            show(f"\n{profile.name}, {stages} stages: stretch {stretch:g}\n")
    if given.ratios:
        show("\n".join(ratio_table(compared)))


if __name__ == "__main__":
    main()
