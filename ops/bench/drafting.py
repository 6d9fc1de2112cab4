"""The drafter's own speed, and the share of drafting that overlaps with verification.

    python -m ops.bench.drafting [--sources draft,head,ngram,draft+ngram] [--nodes 1,8,32,64]
                                 [--context 256] [--repeats 7] [--profile jetson-7b]
                                 [--strategies a,b,...] [--tokens 48]

First table, real time on this machine with one torch thread: a step that drafts for ``nodes``
nodes of one level. *recomputed*: one pass per node over its whole path, without a KV cache; *one
pass per node*: with a KV cache, one row per pass; *one pass*: with a KV cache, all nodes of the
level together, as FlowSpec does. Variants alternate; medians over the repeats. Each source of a
``a:b`` choice has its own rows.

Second table, simulated on a profile with the first source's real acceptance: the drafter's passes
and rows per committed token, without prefill, and the share of drafting time during which a stage
computed. Prints Markdown.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec.cli.bench import strategies_of
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load
from flowspec.model.base import DraftExecutor
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.sources import choices, load_sources
from flowspec.strategies import EXACT
from flowspec.testbed.naming import drafter_of
from ops.bench.report import machine_line
from ops.bench.systems import show
from ops.bench.trace import TraceBench

#: A run that keeps its rows between passes, and one that starts empty.
KEPT = RunKey("kept", 1)
FRESH = RunKey("fresh", 1)
#: Candidates per node, as PipeDec's and SpecPipe's ``children``.
WIDTH = 16


class Level:
    """A context of random tokens, and ``nodes`` children of its last token to draft for."""

    def __init__(
        self, drafter: DraftExecutor, vocabulary: int, hidden: int, context: int, nodes: int
    ) -> None:
        drawn = np.random.default_rng(1)
        self._drafter = drafter
        self._context = context
        self._nodes = nodes
        self._tokens = drawn.integers(3, vocabulary, context + nodes).tolist()
        self._features = drawn.standard_normal((context, hidden), np.float32)
        self._open(KEPT)
        self._pass(KEPT, range(context), ())

    def recomputed(self) -> float:
        """Seconds of one pass per node over its whole path, without allocating its cache."""
        seconds = 0.0
        context = self._context
        for node in range(context, context + self._nodes):
            self._open(FRESH)
            seconds += self._pass(FRESH, (*range(context), node), (context,))
            self._drafter.release(FRESH)
        return seconds

    def one_by_one(self) -> float:
        """Seconds of one pass per node over its own row."""
        return sum(self._below(at, 1) for at in range(self._nodes))

    def together(self) -> float:
        """Seconds of one pass over all nodes."""
        return self._below(0, self._nodes)

    def _open(self, run: RunKey) -> None:
        self._drafter.allocate(run, self._context + self._nodes + 1, Sampling(), Returns())
        if self._drafter.wants_hidden:
            self._drafter.learn(run, range(self._context), self._features)

    def _below(self, first: int, count: int) -> float:
        ids = range(self._context + first, self._context + first + count)
        # The first pass prunes the rows that the previous step computed.
        pruned = None if first else Pruned((), ())
        return self._pass(KEPT, ids, tuple(range(count)), pruned)

    def _pass(
        self,
        run: RunKey,
        ids: Sequence[int],
        answers: tuple[int, ...],
        pruned: Pruned | None = None,
    ) -> float:
        """Seconds of a pass over ``ids``: rows of the context or the level."""
        context = self._context
        part = Part(
            run=run,
            segment=-1,
            ids=tuple(ids),
            parents=tuple(min(node, context) - 1 for node in ids),
            positions=tuple(min(node, context) for node in ids),
            tokens=tuple(self._tokens[node] for node in ids),
            offsets=(),
            context=sum(node < context for node in ids),
            pruned=pruned,
            answers=answers,
        )
        work = Draft(part, WIDTH)
        began = time.perf_counter()
        self._drafter.run(work)
        return time.perf_counter() - began


def step_seconds(level: Level, repeats: int) -> list[float]:
    """Median seconds of a step: recomputed, a pass per node, one pass; the first turn warms up."""
    methods = (level.recomputed, level.one_by_one, level.together)
    taken = [[method() for method in methods] for _ in range(repeats + 1)][1:]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def speed_table(sources: Sequence[str], nodes: Sequence[int], context: int, repeats: int) -> None:
    """The first table."""
    import torch

    torch.set_num_threads(1)
    target = open_directory(default_pair()[0])
    show(f"{machine_line()}; a context of {context} tokens, {WIDTH} continuations per node\n")
    show(
        "| source | nodes | recomputed, ms | one pass per node, ms | one pass, ms "
        "| first over last |\n" + "|---" * 6 + "|"
    )
    for source in dict.fromkeys(
        choice for named in sources for choice in choices(drafter_of(named))
    ):
        drafter = load_sources(source, target)
        for count in nodes:
            level = Level(drafter, target.vocabulary, target.hidden_size, context, count)
            seconds = step_seconds(level, repeats)
            cells = " | ".join(f"{one * 1e3:.2f}" for one in seconds)
            show(f"| {source} | {count} | {cells} | {seconds[0] / seconds[-1]:.1f} |")


def hidden_table(bench: TraceBench, profile: Profile, strategies: Sequence[str]) -> None:
    """The second table, at the profile's stage count, without strategies that draft nothing."""
    show(f"\n{profile.name}, {profile.stages[0]} stages, simulated: {bench.line}")
    show(
        "| strategy | passes per token | rows per token "
        "| drafting, ms per token | of that hidden |\n" + "|---" * 5 + "|"
    )
    for strategy in strategies:
        runs, traces = bench.run(strategy, profile, profile.stages[0])
        tokens = sum(run.stats["tokens"] - 1 for run in runs)
        sums = Counter[str]()
        for trace in traces:
            sums.update(trace.drafting())
        if sums["passes"]:
            passes, rows, seconds = (sums[what] / tokens for what in ("passes", "rows", "seconds"))
            hidden = sums["hidden"] / sums["seconds"]
            show(f"| {strategy} | {passes:.2f} | {rows:.1f} | {seconds * 1e3:.1f} | {hidden:.0%} |")


def main() -> None:
    parser = Parser()
    parser.add_argument("--sources", default="draft,head,ngram,draft+ngram")
    parser.add_argument("--nodes", default="1,8,32,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", default="jetson-7b")
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="separated by spaces or commas"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=1)
    given = parser.parse_args()
    strategies = strategies_of([given.strategies])
    sources = given.sources.split(",")
    speed_table(sources, list(map(int, given.nodes.split(","))), given.context, given.repeats)
    bench = TraceBench(sources[0], given.tokens, given.per_kind)
    hidden_table(bench, load(given.profile), strategies)


if __name__ == "__main__":
    main()
