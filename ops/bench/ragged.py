"""A stage's pass over rows of several jobs against a pass for each of them.

    python -m ops.bench.ragged [--model DIR] [--jobs 8] [--rows 1,12,32] [--rounds 40]

A middle stage of at most six layers of ``--model``, by default the packaged target. Every job has a
context of its own, from 40 to 900 rows, and a chain of new rows above it, which the next pass
prunes. Median CPU milliseconds of the executor over rounds, in which both take turns; one torch
thread, float32. Every row of the shared pass is checked to have the bits of the job's own pass.
Prints Markdown.
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
from flowspec.core.protocol.work import Part, Pass, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, StateError
from flowspec.model.base import RowArray
from flowspec.model.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.placing import place
from flowspec.model.stage import ModelStage, load_stage
from ops.bench.arguments import count, counts
from ops.bench.report import machine_line

LAYERS = 6
#: Rows of the shortest and of the longest context.
CONTEXTS = (40, 900)
#: Rounds at the start that count for nothing.
WARM = 3


class Jobs:
    """``number`` jobs at ``stage``, which give ``rows`` rows to a pass.

    Their contexts have from ``contexts[0]`` to ``contexts[1]`` rows.
    """

    def __init__(
        self,
        stage: ModelStage,
        name: str,
        number: int,
        rows: int,
        contexts: tuple[int, int] = CONTEXTS,
    ) -> None:
        self._stage = stage
        self._rows = rows
        self._draw = np.random.default_rng(0)
        self._width = int(stage.block.config.hidden_size)
        self._next: dict[RunKey, int] = {}  # ids, which positions follow
        self._context: dict[RunKey, int] = {}
        for at in range(number):
            run = RunKey(f"{name}-{at}", 1)
            length = contexts[0] + (contexts[1] - contexts[0]) * at // max(1, number - 1)
            stage.allocate(run, length + 2 * rows, Sampling(), Returns())
            ids = tuple(range(length))
            parents = tuple(node - 1 for node in ids)
            part = Part(run, 0, ids, parents, ids, (), ids, length)
            stage.run(Pass((part,)), [self._given(length)])
            self._next[run] = self._context[run] = length

    def _given(self, rows: int) -> RowArray:
        return self._draw.standard_normal((rows, self._width), np.float32)

    def parts(self) -> tuple[tuple[Part, ...], list[RowArray]]:
        """The parts of the next pass, which drop the rows of the last one, and their rows."""
        parts = []
        for run, first in self._next.items():
            context = self._context[run]
            ids = tuple(range(first, first + self._rows))
            parents = (context - 1, *ids[:-1])
            places = tuple(range(context, context + self._rows))
            offsets = tuple(range(self._rows))
            pruned = Pruned((), ()) if first > context else None
            parts.append(Part(run, 1, ids, parents, places, (), offsets, pruned=pruned))
            self._next[run] = first + self._rows
        return tuple(parts), [self._given(self._rows) for _ in parts]

    def release(self) -> None:
        for run in self._next:
            self._stage.release(run)


def together(stage: ModelStage, parts: Sequence[Part], rows: Sequence[RowArray]) -> list[RowArray]:
    """The rows of one pass over all parts."""
    return stage.run(Pass(tuple(parts)), rows)[1]


def apart(stage: ModelStage, parts: Sequence[Part], rows: Sequence[RowArray]) -> list[RowArray]:
    """The rows of a pass for each part."""
    return [stage.run(Pass((part,)), [own])[1][0] for part, own in zip(parts, rows, strict=True)]


Way = Callable[[ModelStage, Sequence[Part], Sequence[RowArray]], list[RowArray]]


def measure(stage: ModelStage, jobs: int, rows: int, rounds: int) -> tuple[float, float]:
    """Median CPU seconds of passes of their own, all told, and of the shared pass."""
    ways: tuple[Way, Way] = (apart, together)
    twins = [Jobs(stage, name, jobs, rows) for name in ("apart", "together")]
    spent: list[list[float]] = [[], []]
    for _ in range(WARM + rounds):
        found = []
        for at, (way, own) in enumerate(zip(ways, twins, strict=True)):
            parts, given = own.parts()
            began = time.thread_time()
            found.append(way(stage, parts, given))
            spent[at].append(time.thread_time() - began)
        if not all(map(np.array_equal, *found)):
            raise StateError("a row of a shared pass has other bits than in its own")
    for own in twins:
        own.release()
    alone, shared = (statistics.median(times[WARM:]) for times in spent)
    return alone, shared


def table(directory: ModelDirectory, jobs: int, rows: Sequence[int], rounds: int) -> str:
    """The measured times of a stage of ``directory``, as Markdown."""
    first = max(0, (directory.layers - LAYERS) // 2)
    layers = range(first, min(first + LAYERS, directory.layers))
    stage = load_stage(directory, layers, placing=place("float32", "cpu", directory.config))
    lines = [
        f"| rows of each of {jobs} jobs | {jobs} passes, ms | one pass, ms | one over {jobs} |",
        "|---|---|---|---|",
    ]
    for width in rows:
        alone, shared = measure(stage, jobs, width, rounds)
        times = f"{alone * 1e3:.2f} | {shared * 1e3:.2f} | {shared / alone:.2f}"
        lines.append(f"| {width} | {times} |")
    by = stage.block.place_facts()["layers_by"]
    return "\n".join([f"{len(layers)} of {directory.layers} layers, {by}", "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.ragged", description=__doc__)
    add = parser.add_argument
    add("--model", default=default_pair()[0], help="a model's folder (the packaged target)")
    add("--jobs", type=count, default=8, help="jobs that share a pass (8)")
    add("--rows", type=counts, default=[1, 12, 32], help="rows of each of them (1,12,32)")
    add("--rounds", type=count, default=40, help="rounds (40)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measured = (options.jobs, options.rows, options.rounds)
    print(f"{machine_line()}; load {os.getloadavg()[0]:.1f} of other work at the start\n")
    try:
        print(table(open_directory(options.model), *measured))
    except FlowSpecError as error:
        sys.exit(f"ragged: {error}")


if __name__ == "__main__":
    main()
