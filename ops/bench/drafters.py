"""Kinds of drafters compared: what each pass yields, and the time between tokens they lead to.

    python -m ops.bench.drafters [--drafters slm=draft,head=head,block=DIR] [--strategies a,b,...]
                                 [--profile jetson-7b-block] [--tokens 48] [--per-kind 2]
                                 [--temperatures 0,1]

``--drafters``: pairs of a name in the profile, whose pass times are charged, and the drafter whose
real acceptance is simulated: a packaged one or a folder (``ops.train.head``, ``ops.train.block``).
The machines are the live ones; the text of every run is checked. Everything is simulated but the
last column, the CPU time of the drafter's passes on this machine with one torch thread.

*TBT*: decode time per token. *tokens per round*: tokens between two fresh roots, a verification of
a synchronous strategy. *passes*, *drafting*: passes of the drafter per token after the first, and
their time on the profile. Prints Markdown.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.cli.bench import strategies_of
from flowspec.core.protocol.addresses import DRAFT, Address
from flowspec.core.protocol.machine import Commit, Compute, Done, Input, Output
from flowspec.core.protocol.work import Draft, DraftDone, DraftPass
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.sources import labels, load_sources, taps_of
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from flowspec.rehearse.compare.grid import LOOP
from flowspec.rehearse.compare.simulate import profile_costs, returns_hidden, simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import build
from ops.bench.report import machine_line
from ops.bench.simulated import PROMPTS
from ops.bench.systems import chosen_prompts, show

#: Strategies that draft in different ways: whole trees, merges, layers, chains, best nodes.
STRATEGIES = "static_tree,naive_pp,flowspec,pipedec,specpipe,chain,auto"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A drafter under the name ``timed`` of a profile; ``label``: what the table calls it."""

    timed: str
    name: str
    label: str


class DrafterPasses:
    """A simulation's tap: the drafter's passes and their seconds, after the first token."""

    def __init__(self) -> None:
        self.passes = 0
        self.seconds = 0.0
        self._committed = False
        self._began = 0.0
        self._counts = False

    def __call__(self, node: Address, now: float, event: Input, outputs: Sequence[Output]) -> None:
        if node != DRAFT:
            return
        if isinstance(event, Done) and self._counts:
            self.passes += 1
            self.seconds += now - self._began
            self._counts = False
        self._committed |= any(isinstance(output, Commit) for output in outputs)
        if any(isinstance(o, Compute) and isinstance(o.work, DraftPass) for o in outputs):
            self._began, self._counts = now, self._committed


class CpuClock:
    """CPU seconds spent in the passes of one drafter, after prefill or not."""

    def __init__(self, drafter: DraftExecutor) -> None:
        self.seconds = 0.0
        self._run: Callable[[Draft], DraftDone] = drafter.run
        vars(drafter)["run"] = self._timed

    def _timed(self, work: Draft) -> DraftDone:
        began = time.thread_time()
        done = self._run(work)
        self.seconds += time.thread_time() - began
        return done


def contestants(given: str) -> list[Contestant]:
    """The pairs of ``--drafters``; ConfigError if one is no pair."""
    pairs = [entry.partition("=") for entry in given.split(",")]
    for timed, _, name in pairs:
        if not timed or not name:
            raise ConfigError(f"drafters {given!r}; expected pairs like slm=draft,block=DIR")
    return [Contestant(timed, name, labels(name)[0]) for timed, _, name in pairs]


def row(
    profile: Profile,
    strategy: str,
    contestant: Contestant,
    target: ModelDirectory,
    drafter: DraftExecutor,
    runs: Sequence[Text],
) -> str:
    """One line of the table: ``strategy`` over all texts, one after another."""
    stages = profile.stages[0]
    hidden = returns_hidden(drafter, build(strategy, stages))
    costs = profile_costs(profile, stages, contestant.timed, hidden=hidden)
    known = History()
    sums: defaultdict[str, float] = defaultdict(float)
    clock = CpuClock(drafter)
    for text in runs:
        taken = DrafterPasses()
        ran = simulate(text, strategy, stages, target, drafter, costs, tap=taken, history=known)
        sums["passes"] += taken.passes
        sums["seconds"] += taken.seconds
        sums["tokens"] += ran.stats["tokens"] - 1
        sums["rounds"] += ran.stats["rounds"]
        sums["decode"] += ran.stats["decode_seconds"]
    vars(drafter).pop("run", None)
    tokens = sums["tokens"]
    return (
        f"| {strategy} | {contestant.label} | {sums['decode'] / tokens * 1e3:.1f} "
        f"| {tokens / sums['rounds']:.2f} | {sums['passes'] / tokens:.2f} "
        f"| {sums['seconds'] / tokens * 1e3:.1f} | {clock.seconds / tokens * 1e3:.1f} |"
    )


def with_rows(runs: Sequence[Text], name: str, target: ModelDirectory) -> list[Text]:
    """``runs`` with the rows that the target returns to the drafter ``name``."""
    from flowspec.model.reference import Reference

    reference = Reference(target)
    taps = taps_of(name, target)
    return [
        replace(text, hidden=reference.returned((*text.prompt, *text.output), taps))
        for text in runs
    ]


def main() -> None:
    parser = Parser()
    parser.add_argument("--drafters", default="slm=draft,head=head")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--profile", default="jetson-7b-block")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--temperatures", default="0,1")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    found = contestants(given.drafters)
    profile = load(given.profile)
    for one in found:
        profile.check_source(one.timed)
    target = open_directory(default_pair()[0])
    drafters = [load_sources(one.name, target) for one in found]
    prompts = chosen_prompts(PROMPTS, given.per_kind)
    show(f"{profile.name}, {profile.stages[0]} stages; CPU times on {machine_line()}")
    for temperature in map(float, given.temperatures.split(",")):
        said = texts(prompts, [Sampling(temperature)], given.tokens, target)
        kept = [text for text in said if repeated_4grams(text.output) < LOOP]
        show(
            f"\nT = {temperature:g}, {len(kept)} prompts, {given.tokens} tokens; "
            f"{len(said) - len(kept)} loops left out\n\n"
            "| strategy | drafter | TBT, ms | tokens per round | passes per token "
            "| drafting, ms per token | CPU here, ms per token |\n" + "|---" * 7 + "|"
        )
        fed = [with_rows(kept, one.name, target) for one in found]
        for strategy in strategies_of([given.strategies]):
            for one, drafter, runs in zip(found, drafters, fed, strict=True):
                show(row(profile, strategy, one, target, drafter, runs))


if __name__ == "__main__":
    try:
        main()
    except FlowSpecError as error:
        raise SystemExit(str(error)) from None
