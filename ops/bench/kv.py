"""KV rows in ranges of their own against blocks of a pool: time of a pass, memory.

    python -m ops.bench.kv [--model DIR] [--contexts 64,512,2048] [--jobs 1,8] [--rows 12]
                           [--rounds 40] [--shared 600] [--mixed 64]

*Pass*: a middle stage of at most six layers of ``--model``, by default the packaged target; every
job gives a chain of ``--rows`` new rows, which the next pass prunes. *Apart*: no two blocks of a
job are neighbours, the worst that a pool can come to. Median CPU milliseconds of the executor over
rounds in which the stores take turns; one torch thread, float32. Every row of a pool is checked to
have the bits of the contiguous store. *Keep*, *begin*: the time to keep ``--shared`` rows of a job,
and to begin another one with them.

*Memory*: of the process beyond what it had before, in MiB, for rows of 4 layers with 8 key heads of
128 values, float32, which are only written; each case in a process of its own. *Shared*: eight jobs
begin with the same ``--shared`` kept rows, add 40 and have 24 tree rows. *Mixed*: ``--mixed`` jobs
of 32 to 1,500 rows, eight at a time; of each that ends, the rows are kept, 4,096 at most. What is
held at the end, with the last eight, and the highest on the way. Prints Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Kept, Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import BLOCK_ROWS
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, StateError
from flowspec.model.block import LayerBlock
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.kept_rows import KeptRows
from flowspec.model.kv import TreeCache
from flowspec.model.paged import OneLevelCache, PagedCache, PagedStore
from flowspec.model.placing import place
from flowspec.model.stage import ModelStage
from ops.bench.arguments import count, counts
from ops.bench.ragged import LAYERS, WARM, Jobs, together
from ops.bench.report import machine_line

STORES = ("contiguous", "paged", "apart")
#: Rows of the memory cases: layers, key heads, values of a head.
SHAPE = (4, 8, 128)
JOBS = 8
#: Rows that a job of the shared case adds to the kept ones, and its tree's.
ADDED, TREE = 40, 24
MIXED_ROWS = (32, 1500)
KEPT_ROWS = 4096


# ---- passes --------------------------------------------------------------------------------------


def stages(block: LayerBlock, rows: int) -> dict[str, ModelStage]:
    """A stage of ``block`` by store; a pool has room for ``rows`` rows in blocks apart."""
    stores = [block.new_store(2 * -(-rows // BLOCK_ROWS)) for _ in STORES[1:]]
    _take_every_second(stores[1])
    found = [ModelStage(block), *(ModelStage(block, store=store) for store in stores)]
    return dict(zip(STORES, found, strict=True))


def _take_every_second(store: PagedStore) -> None:
    pool = store.pool
    blocks = [pool.take(at - 1 if at else None) for at in range(len(pool))]
    for block in blocks[::2]:
        pool.drop(block)


def passes(block: LayerBlock, context: int, jobs: int, rows: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds of a pass by store; StateError if the rows differ."""
    room = jobs * (context + 3 * BLOCK_ROWS + 2 * rows)
    by_store = stages(block, room)
    given = {
        name: Jobs(stage, name, jobs, rows, (context, context)) for name, stage in by_store.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in by_store}
    for _ in range(WARM + rounds):
        found = []
        for name, stage in by_store.items():
            parts, inputs = given[name].parts()
            began = time.thread_time()
            found.append(together(stage, parts, inputs))
            spent[name].append(time.thread_time() - began)
        if not all(all(map(np.array_equal, found[0], other)) for other in found[1:]):
            raise StateError("a row has other bits in a pool")
    return {name: statistics.median(times[WARM:]) for name, times in spent.items()}


def keeping(block: LayerBlock, rows: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median CPU seconds to keep ``rows`` rows and to begin with them, by store."""
    found = {}
    for name, stage in stages(block, 3 * rows).items():
        if name == STORES[-1]:
            continue
        Jobs(stage, name, 1, 1, (rows, rows))
        source = RunKey(f"{name}-0", 1)
        keeps: list[float] = []
        begins: list[float] = []
        for at in range(WARM + rounds):
            run = RunKey(f"later-{at}", 1)
            stage.allocate(run, rows + BLOCK_ROWS, Sampling(), Returns())
            keeps.append(_timed(stage.keep, source, [Kept(rows)]))
            begins.append(_timed(stage.resume, run, source, [rows]))
            stage.release(run)
        found[name] = (statistics.median(keeps[WARM:]), statistics.median(begins[WARM:]))
    return found


def _timed(call: Callable[..., None], *given: object) -> float:
    began = time.thread_time()
    call(*given)
    return time.thread_time() - began


# ---- memory --------------------------------------------------------------------------------------


class Memory:
    """Jobs' rows in one store, written but not computed."""

    def __init__(self, paged: bool) -> None:
        rows = JOBS * (MIXED_ROWS[1] + 2 * BLOCK_ROWS) + KEPT_ROWS + 64 * BLOCK_ROWS
        layers, heads, size = SHAPE
        self._store = (
            PagedStore.allocate(layers, heads, rows // BLOCK_ROWS, size, torch.float32)
            if paged
            else None
        )
        self._kept: KeptRows[Any] = KeptRows()
        self._caches: dict[RunKey, OneLevelCache] = {}
        self._before = _resident("VmRSS")

    def open(self, run: RunKey, source: RunKey | None = None, held: int = 0) -> None:
        layers, heads, size = SHAPE
        cache: OneLevelCache
        if self._store is None:
            most = MIXED_ROWS[1] + 2 * BLOCK_ROWS
            cache = TreeCache.allocate(layers, heads, most, size, torch.float32)
        else:
            cache = self._store.new_cache()
        if source is not None:
            self._kept.resume(cache, source, held)
        self._caches[run] = cache

    def add(self, run: RunKey, first: int, rows: int, *, tree: bool = False) -> None:
        """Write ``rows`` rows from ``first`` on: context, or a chain of a tree."""
        ids = tuple(range(first, first + rows))
        parents = tuple(node - 1 for node in ids)
        context = 0 if tree else rows
        part = Part(run, 0, ids, parents, ids, ids, (), context)
        cache = self._caches[run]
        cache.begin_pass(part)
        for slots in cache.slots(rows):
            for piece in slots.new:
                piece.fill_(1.0)

    def end(self, run: RunKey, keep: int = 0) -> None:
        cache = self._caches.pop(run)
        if keep:
            self._kept.keep(run, cache, Kept(keep, Pruned((), ())))
        if isinstance(cache, PagedCache):
            cache.free()

    def evict(self, run: RunKey) -> None:
        self._kept.evict(run)

    @property
    def held(self) -> float:
        """MiB of the process beyond what it had before."""
        return (_resident("VmRSS") - self._before) / 1024

    @property
    def highest(self) -> float:
        """The most that it had at any time."""
        return (_resident("VmHWM") - self._before) / 1024


def shared(paged: bool, rows: int) -> tuple[float, float]:
    """MiB held and at most, with jobs that begin with the same ``rows`` kept rows."""
    memory = Memory(paged)
    first = RunKey("first", 1)
    memory.open(first)
    memory.add(first, 0, rows)
    memory.end(first, rows)
    for number in range(JOBS):
        run = RunKey(f"job-{number}", 1)
        memory.open(run, first, rows)
        memory.add(run, rows, ADDED)
        memory.add(run, rows + ADDED, TREE, tree=True)
    return memory.held, memory.highest


def mixed(paged: bool, jobs: int) -> tuple[float, float]:
    """MiB held and at most, after ``jobs`` jobs of many lengths."""
    memory = Memory(paged)
    draw = random.Random(0)
    open_jobs: list[tuple[RunKey, int]] = []
    kept: list[tuple[RunKey, int]] = []
    for number in range(jobs):
        if len(open_jobs) == JOBS:
            run, rows = open_jobs.pop(draw.randrange(JOBS))
            while kept and sum(each for _, each in kept) + rows > KEPT_ROWS:
                memory.evict(kept.pop(0)[0])
            memory.end(run, rows)
            kept.append((run, rows))
        run = RunKey(f"job-{number}", 1)
        rows = draw.randint(*MIXED_ROWS)
        memory.open(run)
        for first in range(0, rows, 256):
            memory.add(run, first, min(256, rows - first))
        memory.add(run, rows, TREE, tree=True)
        open_jobs.append((run, rows))
    return memory.held, memory.highest


def _resident(name: str) -> int:
    """KiB of this process, from its status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def apart(case: Callable[[bool, int], tuple[float, float]], rows: int) -> list[tuple[float, float]]:
    """``case`` with either store, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        return [pool.submit(case, paged, rows).result() for paged in (False, True)]


# ---- report --------------------------------------------------------------------------------------


def pass_table(block: LayerBlock, given: argparse.Namespace) -> list[str]:
    """The time of a pass by context and number of jobs."""
    lines = [
        f"| context | jobs, {given.rows} rows each | contiguous, ms | paged, ms | over contiguous "
        "| apart, ms | over contiguous |",
        "|---|---|---|---|---|---|---|",
    ]
    for context in given.contexts:
        for jobs in given.jobs:
            times = passes(block, context, jobs, given.rows, given.rounds)
            plain, paged, far = (times[name] for name in STORES)
            lines.append(
                f"| {context} | {jobs} | {plain * 1e3:.2f} | {paged * 1e3:.2f} "
                f"| {paged / plain:.2f} | {far * 1e3:.2f} | {far / plain:.2f} |"
            )
    return lines


def keep_table(block: LayerBlock, given: argparse.Namespace) -> list[str]:
    """The time to keep rows, and to begin with them."""
    times = keeping(block, given.shared, given.rounds)
    lines = [f"| {given.shared} rows | contiguous, us | paged, us |", "|---|---|---|"]
    for at, name in enumerate(("keep", "begin")):
        both = " | ".join(f"{times[store][at] * 1e6:.0f}" for store in STORES[:2])
        lines.append(f"| {name} | {both} |")
    return lines


def memory_table(given: argparse.Namespace) -> list[str]:
    """What is held in two cases."""
    lines = [
        "| case | contiguous, MiB | at most | paged, MiB | at most | paged over contiguous |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in (
        (f"{JOBS} jobs share {given.shared} rows", apart(shared, given.shared)),
        (f"after {given.mixed} mixed jobs", apart(mixed, given.mixed)),
    ):
        (plain, plain_most), (paged, paged_most) = found
        lines.append(
            f"| {name} | {plain:.0f} | {plain_most:.0f} | {paged:.0f} | {paged_most:.0f} "
            f"| {paged / plain:.2f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.kv", description=__doc__)
    add = parser.add_argument
    add("--model", default=default_pair()[0], help="a model's folder (the packaged target)")
    add("--contexts", type=counts, default=[64, 512, 2048], help="rows (64,512,2048)")
    add("--jobs", type=counts, default=[1, 8], help="jobs that share a pass (1,8)")
    add("--rows", type=count, default=12, help="rows of each of them (12)")
    add("--rounds", type=count, default=40, help="rounds (40)")
    add("--shared", type=count, default=600, help="kept rows that jobs begin with (600)")
    add("--mixed", type=count, default=64, help="jobs of the mixed case (64)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine_line()}; load {os.getloadavg()[0]:.1f} of other work at the start\n")
    try:
        directory = open_directory(given.model)
        first = max(0, (directory.layers - LAYERS) // 2)
        layers = range(first, min(first + LAYERS, directory.layers))
        placing = place("float32", "cpu", directory.config)
        block = LayerBlock(directory, layers, first=False, last=False, placing=placing)
        print(f"{len(layers)} of {directory.layers} layers\n")
        for table in (pass_table(block, given), keep_table(block, given), memory_table(given)):
            print("\n".join(table), end="\n\n")
    except FlowSpecError as error:
        sys.exit(f"kv: {error}")


if __name__ == "__main__":
    main()
