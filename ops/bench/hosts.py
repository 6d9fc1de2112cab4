"""Real, emulated and simulated decoding of one cluster of five hosts, by the links' latency.

    python -m ops.bench.hosts [--busy] [--latencies 0,5,25,50] [--ways straight,broker]
                              [--strategies "flowspec auto"] [--stages 4] [--tokens 24]
                              [--count 2] [--repeats 9]

*Real*: workers as processes on hosts that are network namespaces of this machine (``ops.hosts``):
one with the broker and the draft worker, one per stage. Every packet between two hosts takes the
latency one way. The packaged pair in float32, greedy, one torch thread a process.

*Emulated* and *simulated* are charged by a profile that is measured here first, in none of the real
runs: the stages' passes at the pipeline's pace (``ops.hosts.paced``), the links by round trips
(``ops.hosts.echo``), and the software of a hop by live workers that rest where a link would be
(``ops.hosts.hop``). *Emulated, own software*: charged with the model's part of the passes alone;
the workers' own CPU time and bare writes are added as they run.

Times are of decoding alone, ms a token: medians over jobs for real plain decoding, else pooled over
the prompts. Every text must be the target's own. Needs root on Linux. A machine with other work is
refused unless ``--busy`` is given. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from flowspec.client import Client
from flowspec.cluster import Places, Setup
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, FlowSpecError, StateError
from flowspec.model.weights.directory import default_pair, layer_ranges, open_directory
from flowspec.plan.predict import token_seconds
from flowspec.rehearse.compare.naming import counted
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times
from flowspec.rehearse.devices.way import Way
from flowspec.rehearse.measure import MeasurementPlan, measure
from flowspec.strategies import build
from ops.bench.arguments import count, latencies
from ops.bench.emulate import OVERTAKEN_SHARE, Emulated, EmulatedCluster
from ops.bench.emulation import prompts_in_turn, simulated
from ops.bench.hosts_table import (
    BROKER,
    PLAIN,
    STRAIGHT,
    Decoded,
    Given,
    Linkage,
    parts_table,
    plain_table,
    strategies_table,
    verdict,
)
from ops.bench.peer import load_words
from ops.bench.report import machine_line
from ops.hosts.echo import one_way
from ops.hosts.hop import resting
from ops.hosts.network import Network, check, network
from ops.hosts.paced import PacedStages, StageTimes
from ops.hosts.pipeline import pipeline
from ops.parser import Parser

#: How the workers are told which way rows go: their own choice is straight to other hosts.
ROWS = {STRAIGHT: "auto", BROKER: "broker"}
#: Rows of the passes that are measured at a pipeline's pace.
PASS_ROWS = (1, 8, 32)
#: Rest between two stages' passes beside the link, seconds: about a hop's software.
HOP_PAUSE = 1e-3
ROUND_TRIPS = 25
#: Real runs of plain decoding with each prompt.
PLAIN_RUNS = 2
DRAFT_REPEATS = 9
SOURCE = "slm"
#: What a layer and the head cost beside measured blocks, which have them, seconds.
NOTHING = Times(((1, 1e-9),))


@dataclass(frozen=True, slots=True)
class HostsPlan:
    """What is run; ``places`` in the order of the tables."""

    setup: Setup
    places: tuple[Linkage, ...]
    strategies: tuple[str, ...]
    found: tuple[Text, ...]
    repeats: int

    @property
    def every(self) -> tuple[str, ...]:
        """Plain decoding first."""
        return (PLAIN, *self.strategies)


@dataclass(slots=True)
class HostTimes:
    """What was measured before the runs: the drafters' passes, and by place the passes of every
    stage, a link's seconds one way, and those of a hop's software.
    """

    drafters: Mapping[str, Times]
    passes: dict[Linkage, list[StageTimes]] = field(default_factory=dict)
    links: dict[Linkage, float] = field(default_factory=dict)
    hops: dict[Linkage, float] = field(default_factory=dict)

    def given(self, place: Linkage) -> Given:
        """What a place's profile is made of."""
        passes = sum(stage.whole.at(1) for stage in self.passes[place])
        return Given(self.links[place], self.hops[place], passes)

    def profile(self, place: Linkage, setup: Setup) -> Profile:
        """The cluster of ``place``, a pass with all its software."""
        target = open_directory(setup.target)
        stages = self.passes[place]
        return Profile(
            "hosts",
            "the packaged pair on this machine",
            "measured by ops.bench.hosts",
            target.layers,
            target.hidden_size,
            4,
            NOTHING,
            NOTHING,
            self.drafters,
            LinkShape(self.links[place], math.inf),
            (setup.stages,),
            split=tuple(len(block) for block in layer_ranges(target.layers, setup.stages)),
            blocks=tuple(stage.whole for stage in stages),
            way=Way("draft", place.way),
            hop=self.hops[place],
        )

    def bare_profile(self, place: Linkage, setup: Setup) -> Profile:
        """The same with the model's part of a pass alone, and no software."""
        stages = self.passes[place]
        blocks = tuple(stage.model for stage in stages)
        return replace(self.profile(place, setup), blocks=blocks, hop=0.0)


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


# ---- measuring the machine -----------------------------------------------------------------------


def measure_place(
    plan: HostsPlan,
    hosts: Network,
    stages: PacedStages,
    place: Linkage,
    machine: HostTimes,
    folder: Path,
) -> None:
    """Measure what the profile of ``place`` is made of, just before it is run."""
    seconds = place.latency / 1e3
    machine.links[place] = one_way(hosts, seconds, ROUND_TRIPS, folder)
    hosts.set_latency(0.0)
    rows = replace(plan.setup, rows=ROWS[place.way])
    with resting(rows, hosts, plan.found[0].prompt, folder) as hop:
        machine.hops[place] = hop(seconds)
    machine.passes[place] = stages.measure(PASS_ROWS, seconds + HOP_PAUSE, plan.repeats)
    software = machine.hops[place] * 1e3
    tell(f"{place.way}, {place.latency:g} ms: a hop's software {software:.2f} ms")


# ---- the three kinds of runs ---------------------------------------------------------------------


def run_real(plan: HostsPlan, hosts: Network, place: Linkage) -> Decoded:
    """Real decoding in ``place``. StateError for another text than the target's."""
    # Before the pipeline starts: its workers decide by the latency how they read.
    hosts.set_latency(place.latency / 1e3)
    times = Decoded()
    with pipeline(replace(plan.setup, rows=ROWS[place.way]), hosts) as client:
        for strategy in plan.every:
            _job(client, plan.found[-1], strategy)
        _decode_plainly(client, plan.found, times)
        for strategy in plan.strategies:
            runs = [_job(client, text, strategy) for text in plan.found]
            seconds = sum(run["decode_seconds"] for run in runs)
            times.real[strategy] = seconds / sum(run["tokens"] - 1 for run in runs)
    hosts.set_latency(0.0)
    tell(f"{place.way}, {place.latency:g} ms: real plain {times.real[PLAIN] * 1e3:.2f} ms")
    return times


def _decode_plainly(client: Client, found: Sequence[Text], times: Decoded) -> None:
    """Medians over all jobs, whose tokens all take the same time."""
    tokens = []
    passes = []
    for text in (*found,) * PLAIN_RUNS:
        run = _job(client, text, PLAIN)
        tokens.append(run["decode_seconds"] / (run["tokens"] - 1))
        passes.append(tokens[-1] * sum(run["stage_busy"]))
    times.real[PLAIN] = statistics.median(tokens)
    times.passes = statistics.median(passes)


def _job(client: Client, text: Text, strategy: str) -> Mapping[str, Any]:
    """The stats of one job; StateError for another text than the target's."""
    result = client.submit(
        prompt_ids=text.prompt, max_new_tokens=len(text.output), strategy=strategy, reuse=False
    ).result()
    if result.token_ids != text.output:
        raise StateError(f"{strategy} on real hosts did not give the target's text")
    return result.stats


def run_emulated(plan: HostsPlan, machine: HostTimes, place: Linkage, times: Decoded) -> None:
    """Emulated decoding in ``place``: with the profile's software, then with its own."""
    setup = plan.setup
    profile = machine.profile(place, setup)
    with EmulatedCluster(profile, setup.stages, free_software=True) as cluster:
        for strategy in plan.every:
            warm_up = plan.found[-1:] if strategy in plan.strategies else ()
            cluster.run_all(warm_up, strategy)
            done = _checked(cluster.run_all(plan.found, strategy), strategy)
            times.emulated[strategy] = token_seconds(done.runs)
            if done.counts.overtaken > OVERTAKEN_SHARE * done.counts.inputs:
                times.refused.add(strategy)
    with EmulatedCluster(machine.bare_profile(place, setup), setup.stages) as cluster:
        done = _checked(cluster.run_all(plan.found, PLAIN), PLAIN)
        times.charged = token_seconds(done.runs)
    tell(
        f"{place.way}, {place.latency:g} ms: emulated plain {times.emulated[PLAIN] * 1e3:.2f} ms, "
        f"with its own software {times.charged * 1e3:.2f} ms"
    )


def _checked(done: Emulated, strategy: str) -> Emulated:
    """``done``; StateError for another text than the target's."""
    if done.different:
        raise StateError(f"{strategy} on emulated hosts did not give the target's text")
    return done


def run_simulated(plan: HostsPlan, machine: HostTimes, place: Linkage, times: Decoded) -> None:
    """Simulated decoding in ``place``; a text that is not the target's is an error there, too."""
    profile = machine.profile(place, plan.setup)
    stages = plan.setup.stages
    known = History()
    for strategy in plan.every:
        simulated(plan.found[-1:], strategy, profile, stages, SOURCE, known)
        times.simulated[strategy] = simulated(plan.found, strategy, profile, stages, SOURCE, known)


def measured_and_run(
    plan: HostsPlan, hosts: Network, folder: Path
) -> tuple[HostTimes, dict[Linkage, Decoded]]:
    """The machine's times and the real runs, place by place: both drift with the machine."""
    setup = plan.setup
    drafts = measure(setup.target, setup.draft, MeasurementPlan(repeats=DRAFT_REPEATS)).drafters
    machine = HostTimes(drafts)
    taken = {}
    with PacedStages(setup.target, setup.stages, max(PASS_ROWS)) as stages:
        for place in plan.places:
            measure_place(plan, hosts, stages, place, machine, folder)
            taken[place] = run_real(plan, hosts, place)
    return machine, taken


# ---- the page ------------------------------------------------------------------------------------


def report(given: argparse.Namespace) -> None:
    """Measure, run, and print the page."""
    load = load_words(busy=given.busy)
    plan = plan_of(given)
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="flowspec-hosts-") as name,
        network(1 + plan.setup.stages, Path(name)) as hosts,
    ):
        machine, taken = measured_and_run(plan, hosts, Path(name))
    for place, times in taken.items():
        run_emulated(plan, machine, place, times)
        run_simulated(plan, machine, place, times)
    print(f"{machine_line()}; {load}")
    print("\n".join(page(plan, machine, taken)))
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}.")


def page(plan: HostsPlan, machine: HostTimes, taken: Mapping[Linkage, Decoded]) -> Iterator[str]:
    """The lines below that on the machine."""
    stages = plan.setup.stages
    tokens = len(plan.found[0].output)
    yield (
        f"\n{1 + stages} hosts, {stages} stages, {counted(len(plan.found), 'prompt')}, "
        f"{tokens} tokens each, "
        "T = 0; ms a token. Every text was the target's own."
    )
    yield f"\n### Plain decoding\n\n{verdict(taken)}\n"
    yield from plain_table(taken)
    yield "\n### Where a token's time goes in plain decoding\n"
    given = {place: machine.given(place) for place in taken}
    yield from parts_table(taken, given, stages)
    if plan.strategies:
        yield "\n### Other strategies, without a bar\n"
        yield from strategies_table(taken, plan.strategies)


def plan_of(given: argparse.Namespace) -> HostsPlan:
    """The plan that the arguments describe; ConfigError for settings that are not valid."""
    check()
    strategies = tuple(given.strategies.split())
    for strategy in strategies:
        build(strategy, given.stages)
    unknown = [way for way in given.ways.split(",") if way not in ROWS]
    if unknown:
        raise ConfigError(f"--ways {unknown[0]!r}; expected some of {', '.join(ROWS)}")
    target, draft = default_pair()
    places = (
        Linkage(way, latency) for way, latency in product(given.ways.split(","), given.latencies)
    )
    return HostsPlan(
        Setup(target, draft, given.stages, places=Places("float32", "cpu", "float32", "cpu")),
        tuple(places),
        strategies,
        tuple(
            texts(prompts_in_turn(given.count), [Sampling()], given.tokens, open_directory(target))
        ),
        given.repeats,
    )


def parser() -> Parser:
    """The command line."""
    made = Parser(description=(__doc__ or "").partition("\n")[0])
    add = made.add_argument
    add("--busy", action="store_true", help="run beside other work; its times are void")
    add("--latencies", type=latencies, default="0,5,25,50", help="ms each way, by commas")
    add("--ways", default=",".join(ROWS), help="of rows, by commas: straight, broker")
    add("--strategies", default="flowspec auto", help="beside plain decoding, by spaces")
    add("--stages", type=count, default=4)
    add("--tokens", type=count, default=24, help="of every text (24)")
    add("--count", type=count, default=2, help="prompts, of six kinds in turn (2)")
    add("--repeats", type=count, default=9, help="of every measured pass (9)")
    return made


def main() -> None:
    try:
        report(parser().parse_args())
    except FlowSpecError as error:
        sys.exit(f"hosts: {error}")


if __name__ == "__main__":
    main()
