"""A drafter's pass for several jobs against a pass for each of them.

    python -m ops.bench.ragged_drafts [--sources draft,head,ngram,draft+ngram] [--target DIR]
                                      [--jobs 8] [--nodes 1,12,32] [--rounds 40]

Every job has a context of its own, from 40 to 900 tokens at random, and a level of new nodes above
it, all of which are answered with ``WIDTH`` continuations; the next pass prunes them. Median CPU
milliseconds of the drafter over rounds, in which both ways take turns; one torch thread. All
proposals of the shared pass are checked to be those of the job's own pass. Prints Markdown.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part, Pruned, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, StateError
from flowspec.model.base import DraftExecutor
from flowspec.model.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.sources import load_sources
from flowspec.testbed.naming import drafter_of
from ops.bench.arguments import count, counts
from ops.bench.ragged import CONTEXTS, WARM
from ops.bench.report import machine_line

SOURCES = "draft,head,ngram,draft+ngram"
#: Continuations of every node.
WIDTH = 4


class DraftedJob:
    """A job with a context of ``length`` random tokens, which drafts for levels of ``nodes``."""

    def __init__(
        self, drafter: DraftExecutor, target: ModelDirectory, name: str, length: int, nodes: int
    ) -> None:
        self._drawn = np.random.default_rng(length)
        self._run = RunKey(name, 1)
        self._nodes = nodes
        self._length = length
        self._vocabulary = target.vocabulary
        self._next = length
        drafter.allocate(self._run, 2 * length + 2 * nodes, Sampling(), Returns())
        ids = range(length)
        if drafter.wants_hidden:
            rows = self._drawn.standard_normal((length, target.hidden_size), np.float32)
            drafter.learn(self._run, ids, rows)
        drafter.run(self._draft(ids, [node - 1 for node in ids], ids, length))

    def draft(self) -> Draft:
        """The next level, in the place of the last one."""
        first = self._next
        self._next += self._nodes
        nodes = range(first, self._next)
        last = self._length - 1
        return self._draft(nodes, [last] * len(nodes), [self._length] * len(nodes), 0)

    def _draft(
        self, ids: Sequence[int], parents: Sequence[int], places: Sequence[int], context: int
    ) -> Draft:
        tokens = self._drawn.integers(3, self._vocabulary, len(ids)).tolist()
        pruned = Pruned((), ()) if ids[0] > self._length else None
        answers = () if context else tuple(range(len(ids)))
        columns = (tuple(ids), tuple(parents), tuple(places), tuple(tokens))
        return Draft(Part(self._run, -1, *columns, (), context, pruned, answers), WIDTH)


Way = Callable[[DraftExecutor, Sequence[Draft]], Sequence[DraftDone | WorkFailed]]


def together(drafter: DraftExecutor, drafts: Sequence[Draft]) -> Sequence[DraftDone | WorkFailed]:
    """The proposals of one pass for all jobs."""
    return drafter.run_together(drafts)


def apart(drafter: DraftExecutor, drafts: Sequence[Draft]) -> Sequence[DraftDone | WorkFailed]:
    """The proposals of a pass for each job."""
    return [drafter.run(draft) for draft in drafts]


def measure(
    drafter: DraftExecutor, target: ModelDirectory, jobs: int, nodes: int, rounds: int
) -> tuple[float, float]:
    """Median CPU seconds of passes of their own, all told, and of the shared pass."""
    ways: tuple[Way, Way] = (apart, together)
    least, most = CONTEXTS
    lengths = [least + (most - least) * at // max(1, jobs - 1) for at in range(jobs)]
    twins = [
        [
            DraftedJob(drafter, target, f"{way.__name__}-{nodes}-{length}-{at}", length, nodes)
            for at, length in enumerate(lengths)
        ]
        for way in ways
    ]
    spent: list[list[float]] = [[], []]
    for _ in range(WARM + rounds):
        found = []
        for at, (way, own) in enumerate(zip(ways, twins, strict=True)):
            drafts = [job.draft() for job in own]
            began = time.thread_time()
            found.append(list(way(drafter, drafts)))
            spent[at].append(time.thread_time() - began)
        if found[0] != found[1]:
            raise StateError("a job's proposals of a shared pass are not those of its own")
    alone, shared = (statistics.median(times[WARM:]) for times in spent)
    return alone, shared


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.ragged_drafts", description=__doc__)
    add = parser.add_argument
    add("--sources", default=SOURCES, help=f"draft sources, separated by commas ({SOURCES})")
    add("--target", default=default_pair()[0], help="the target's folder (the packaged one)")
    add("--jobs", type=count, default=8, help="jobs that share a pass (8)")
    add("--nodes", type=counts, default=[1, 12, 32], help="nodes of each of them (1,12,32)")
    add("--rounds", type=count, default=40, help="rounds (40)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    jobs = options.jobs
    print(f"{machine_line()}; load {os.getloadavg()[0]:.1f} of other work at the start\n")
    print(f"| source | nodes of each of {jobs} jobs | {jobs} passes, ms | one pass, ms | ratio |")
    print("|---|---|---|---|---|")
    try:
        target = open_directory(options.target)
        for source in options.sources.split(","):
            for nodes in options.nodes:
                drafter = load_sources(drafter_of(source), target)
                alone, shared = measure(drafter, target, jobs, nodes, options.rounds)
                times = f"{alone * 1e3:.2f} | {shared * 1e3:.2f} | {shared / alone:.2f}"
                print(f"| {source} | {nodes} | {times} |", flush=True)
    except FlowSpecError as error:
        sys.exit(f"ragged_drafts: {error}")


if __name__ == "__main__":
    main()
