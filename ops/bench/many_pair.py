"""Many jobs at once with the packaged target and head: simulated, and emulated on real processes.

    python -m ops.bench.many_pair --prompts DIR [--profiles rtx3090-70b,jetson-7b,a100-70b]
                                  [--jobs 1,4,8] [--strategies autoregressive,auto] [--tokens 48]
                                  [--temperature 0] [--per-file 8] [--stretch 3]

Closed loops as in ``ops/bench/many.py``, of the target's own texts on the last prompts of every
file in DIR, without those whose greedy text repeats itself. The simulation drafts with the head
itself. The emulation runs the same jobs on a cluster of real worker processes, whose passes take a
profile's times (``ops.bench.emulate``); ``--stretch 0`` leaves it out. Prints Markdown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.model.drafters.drafter_choice import levels_of, wanting_hidden
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import PACKAGED_HEAD, default_pair, open_directory
from flowspec.rehearse.compare.grid import LOOP
from flowspec.rehearse.compare.simulate import profile_costs, returns_hidden
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import build
from ops.bench.arguments import count, counts, prompt_sets
from ops.bench.emulate import EmulatedCluster, EmulatedJob
from ops.bench.loops import Loop, LoopFigures, LoopSetup, figures, jobs_of, share_of
from ops.bench.many import PROFILES, SOURCE, goals
from ops.parser import Parser
from ops.prompts import HELD_OUT, last_prompts

PLAIN = "autoregressive"
STRATEGIES = f"{PLAIN},auto"


@dataclass(frozen=True, slots=True)
class Pairing:
    """What to run; ``stretch``: of the emulation, 0: there is none."""

    profiles: Sequence[Profile]
    jobs: Sequence[int]
    strategies: Sequence[str]
    texts: Sequence[Text]
    stretch: float

    @property
    def is_both(self) -> bool:
        """Whether loops are emulated, too."""
        return self.stretch > 0


def own_texts(folder: Path, per_file: int, tokens: int, temperature: float) -> list[Text]:
    """The target's texts with the rows that the head drafts from, without loops."""
    prompts = [prompt.text for prompt in last_prompts(folder, per_file)]
    target = open_directory(default_pair()[0])
    found = texts(prompts, [Sampling(temperature, seed=1)], tokens, target, hidden=True)
    return [
        text for text in found if len(text.output) == tokens and repeated_4grams(text.output) < LOOP
    ]


def simulated(plan: Pairing, profile: Profile, strategy: str, jobs: int) -> LoopFigures:
    """A closed loop under the virtual clock."""
    stages = profile.stages[0]
    target = open_directory(default_pair()[0])
    drafter = load_sources(PACKAGED_HEAD, target)
    wanting = wanting_hidden(drafter)
    limits = Limits(
        stages,
        target.context,
        target.vocabulary,
        target.eos,
        hidden=wanting[0],
        others=wanting[1:],
        levels=levels_of(drafter),
    )
    hidden = returns_hidden(drafter, build(strategy, stages))
    costs = profile_costs(profile, stages, SOURCE, hidden=hidden)
    return Loop(LoopSetup(limits, costs, drafter, plan.texts), strategy).closed(jobs)


def emulated(plan: Pairing, profile: Profile, strategy: str, jobs: int) -> LoopFigures:
    """The same loop on real processes; ClusterError if the machine did not keep up."""
    models = (default_pair()[0], PACKAGED_HEAD)
    with EmulatedCluster(
        profile,
        profile.stages[0],
        models=models,
        source=SOURCE,
        stretch=plan.stretch,
        jobs=jobs,
    ) as cluster:
        before = cluster.counts()
        found = EmulatedLoop(cluster, strategy, plan.texts).closed(jobs)
        (cluster.counts() - before).check(plan.stretch)
    return found


class EmulatedLoop:
    """Jobs of ``strategy`` on ``cluster``, with ``texts`` in turn."""

    def __init__(self, cluster: EmulatedCluster, strategy: str, texts: Sequence[Text]) -> None:
        self._cluster = cluster
        self._strategy = strategy
        self._texts = texts
        self._running: dict[str, EmulatedJob] = {}
        self._ended: list[EmulatedJob] = []
        self._submitted = 0
        self._last_at = 0.0

    def closed(self, jobs: int) -> LoopFigures:
        """As ``Loop.closed``, in nominal seconds."""
        began = self._cluster.now()
        for at in range(jobs):
            self._submit(share_of(at, jobs))
        first = dict(self._running)
        while self._running:
            self._cluster.read(self._running)
            for name, job in list(self._running.items()):
                if job.stats is not None:
                    self._end(name, job)
                    if self._submitted < jobs_of(jobs):
                        self._submit()
        return self._measured(began, [job.committed_at[-1][0] for job in first.values()])

    def _submit(self, share: float = 1.0) -> None:
        text = self._texts[self._submitted % len(self._texts)]
        kept = max(2, round(len(text.output) * share))
        wanted = Text(text.prompt, text.output[:kept], text.sampling)
        self._running[self._cluster.submit(wanted, self._strategy)] = EmulatedJob(wanted)
        self._submitted += 1
        self._last_at = self._cluster.now()

    def _end(self, name: str, job: EmulatedJob) -> None:
        if tuple(job.tokens) != job.text.output:
            raise ClusterError(f"{self._strategy}: the text of {name} differs from the target's")
        self._ended.append(self._running.pop(name))

    def _measured(self, began: float, first_ended: Sequence[float]) -> LoopFigures:
        begin = min((began + self._last_at) / 2, max(first_ended))
        commits = [job.committed_at for job in self._ended]
        stats = [job.stats for job in self._ended if job.stats is not None]
        return figures(commits, stats, begin, self._last_at)


def table(plan: Pairing) -> Iterator[str]:
    """A row for every loop."""
    ways = [simulated, emulated] if plan.is_both else [simulated]
    names = [way.__name__ for way in ways]
    heads = " | ".join(f"{name}: tokens/s | over plain | gap p99, ms | hit rate" for name in names)
    yield f"| profile | jobs | strategy | goal over plain | {heads} |" + (
        " emulated / simulated |" * plan.is_both
    )
    yield "|---|---|---|---|" + "---|" * (4 * len(ways) + plan.is_both)
    temperature = plan.texts[0].sampling.temperature
    for profile, jobs in product(plan.profiles, plan.jobs):
        goal = goals(profile.name, temperature).get(jobs, "")
        plain: list[float] = []
        for strategy in plan.strategies:
            found = [way(plan, profile, strategy, jobs) for way in ways]
            rates = [one.tokens_per_second for one in found]
            plain = plain or rates
            cells = [
                f"{one.tokens_per_second:.1f} | {one.tokens_per_second / base:.2f} "
                f"| {one.gap_p99 * 1e3:.0f} | {one.hit_rate:.2f}"
                for one, base in zip(found, plain, strict=True)
            ]
            wanted = goal if strategy == "auto" else ""
            row = f"| {profile.name} | {jobs} | {strategy} | {wanted} | {' | '.join(cells)} |"
            yield row + (f" {rates[1] / rates[0]:.2f} |" if plan.is_both else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.many_pair", description=__doc__)
    add = parser.add_argument
    add("--prompts", type=prompt_sets, required=True, help="folder of .jsonl files of prompts")
    add("--profiles", default=PROFILES, help=f"by commas ({PROFILES})")
    add("--jobs", type=counts, default=[1, 4, 8], help="at once (1,4,8)")
    add("--strategies", default=STRATEGIES, help=f"by commas, plain first ({STRATEGIES})")
    add("--tokens", type=count, default=48, help="of every text (48)")
    add("--temperature", type=float, default=0.0, help="(0)")
    add("--per-file", type=count, default=HELD_OUT, help=f"last prompts of every file ({HELD_OUT})")
    add("--stretch", type=float, default=3.0, help="wall seconds per nominal second; 0: simulate")
    given = parser.parse_args(arguments)
    try:
        found = own_texts(given.prompts, given.per_file, given.tokens, given.temperature)
        plan = Pairing(
            [load(name) for name in given.profiles.split(",")],
            given.jobs,
            given.strategies.split(","),
            found,
            given.stretch,
        )
        print(f"{len(found)} texts of {given.tokens} tokens, T = {given.temperature:g}.\n")
        for line in table(plan):
            print(line, flush=True)
    except FlowSpecError as error:
        sys.exit(f"many_pair: {error}")


if __name__ == "__main__":
    main()
