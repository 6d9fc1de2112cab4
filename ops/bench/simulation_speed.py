"""Speed of the simulator without model passes, in tokens per second on one core.

    python -m ops.bench.simulation_speed [--stages 4,21] [--strategies a,b,...] [--tokens 64]
                                         [--temperature 0] [--source draft] [--profile]

A first run of every strategy fills the memo of every drafter (``rehearse.compare.memo``); the
result is the best of three further runs, which compute no model pass. ``--profile`` lists the
slowest functions instead. Prints Markdown.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Sequence

from flowspec.cli.bench import strategies_of
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.naming import canonical, drafter_of
from flowspec.rehearse.compare.simulate import Ran, profile_costs, returns_hidden, simulate
from flowspec.rehearse.compare.texts import texts
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies import EXACT, build
from ops.parser import Parser

PROMPT = "Explain how a lighthouse works, and why ships need it."
#: Its times determine what is drafted and pruned when, not the cost of simulating.
CLUSTER = load("rtx3090-70b")


class SpeedBench:
    """One text and drafters that memoize their proposals for it."""

    def __init__(self, source: str, tokens: int, temperature: float) -> None:
        self.target = open_directory(default_pair()[0])
        self._memos: list[MemoDrafter] = []
        self._source = canonical(source)
        self.drafter = load_sources(drafter_of(source), self.target, self._remembering)
        sampling = Sampling(temperature, seed=1)
        (self.text,) = texts(
            [PROMPT], [sampling], tokens, self.target, hidden=self.drafter.wants_hidden
        )

    def run(self, strategy: str, stages: int) -> Ran:
        """One simulated run."""
        hidden = returns_hidden(self.drafter, build(strategy, stages))
        costs = profile_costs(CLUSTER, stages, self._source, hidden=hidden)
        return simulate(self.text, strategy, stages, self.target, self.drafter, costs)

    @property
    def passes(self) -> int:
        """Model passes computed so far."""
        return sum(memo.passes for memo in self._memos)

    def _remembering(self, drafter: DraftExecutor) -> MemoDrafter:
        self._memos.append(MemoDrafter(drafter))
        return self._memos[-1]

    def speed(self, strategy: str, stages: int, times: int = 3) -> float:
        """Tokens per second on one core, the best of ``times`` runs."""
        self.run(strategy, stages)
        passes = self.passes
        seconds = []
        for _ in range(times):
            begun = time.process_time()
            self.run(strategy, stages)
            seconds.append(time.process_time() - begun)
        if self.passes != passes:
            raise SystemExit(f"{strategy} computed {self.passes - passes} passes that were known")
        return len(self.text.output) / min(seconds)


def profiled(bench: SpeedBench, strategies: Sequence[str], stages: Sequence[int]) -> None:
    """The slowest functions over all runs."""
    watch = cProfile.Profile()
    for strategy in strategies:
        for count in stages:
            bench.run(strategy, count)
            watch.runcall(bench.run, strategy, count)
    pstats.Stats(watch).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = Parser()
    parser.add_argument("--stages", default="4,21")
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="separated by spaces or commas"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--source", default="draft")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    given = parser.parse_args()
    strategies = strategies_of([given.strategies])
    stages = list(map(int, given.stages.split(",")))
    bench = SpeedBench(given.source, given.tokens, given.temperature)
    if given.profile:
        profiled(bench, strategies, stages)
        return
    print(f"| strategy, tokens/s | {' | '.join(f'{count} stages' for count in stages)} |")
    print("|---" * (len(stages) + 1) + "|")
    for strategy in strategies:
        speeds = (bench.speed(strategy, count) for count in stages)
        print(f"| {strategy} | {' | '.join(f'{speed:.0f}' for speed in speeds)} |", flush=True)


if __name__ == "__main__":
    main()
