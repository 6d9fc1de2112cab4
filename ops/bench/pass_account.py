"""Where a pass spends its time, from the read that brings its rows to the write that sends them on.

    python -m ops.bench.pass_account [--model DIR] [--rounds 80] [--rows 1,16]

A real worker of the middle one of three stages, with its machine, link, inbox and recorder, on a
private broker over a unix socket; stages without layers stand before and behind it. First the
packaged target's layers 4 to 8 in float32, then two layers of ``--model`` in four bits (nf4 where
it has a kernel, else int4), by default a random one with the layers of a 1.1 billion weights'
Llama. Then a step of the packaged drafters,
the executor alone. A pass is all that the worker does from the end of the one before: the prune,
the segment, its rows. Median CPU milliseconds of the worker's thread over rounds, one torch thread;
a part's time is without that of the parts inside it. The clocks of the parts run in every second
round, and *measured* is of the rounds without them. *other threads* is the CPU time of the same
process beside the pass. Prints Markdown.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec import observe
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import FlowSpecError
from flowspec.model.base import DraftExecutor
from flowspec.model.kernels import served
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.precision import AUTO
from flowspec.roles.performers import VerifyPerformer
from flowspec.roles.worker import Worker
from flowspec.transport.connections.server import PrivateBroker
from ops.bench import hop
from ops.bench.arguments import count, counts
from ops.bench.pass_parts import Sections
from ops.bench.random_model import Shape, random_model
from ops.bench.report import machine_line

STAGES = 3
MEASURED = 2
#: Rounds at the start that count for nothing.
WARM = 20
#: Tokens before the rows that a drafter's step drafts for.
CONTEXT = 64
KEPT = RunKey("kept", 1)
#: Candidates per node, as PipeDec's and SpecPipe's ``children``.
WIDTH = 16
#: A pass without the parts below: what the worker's loop does itself.
LOOP = "loop"
INPUTS = "inputs"
#: What is timed, as module, attribute and part. They are replaced before a model is loaded, in a
#: process of their own.
TIMED = (
    ("flowspec.transport.link.live_link", "LiveLink.read", "read, codec"),
    ("flowspec.transport.link.live_link", "LiveLink.take_rows", "read, codec"),
    ("flowspec.transport.link.live_link", "LiveLink.write", "codec, write"),
    ("flowspec.core.stage.stage_worker", "StageMachine.step", "machine"),
    ("flowspec.roles.performers", "VerifyPerformer.compute", INPUTS),
    ("flowspec.model.drafters.language_model", "ModelDrafter.run", INPUTS),
    ("flowspec.model.drafters.eagle", "EagleDrafter.run", INPUTS),
    ("flowspec.model.rows.kv", "TreeCache.begin_pass", "places, KV moves"),
    ("flowspec.model.rows.kv", "TreeCache.carry_out", "places, KV moves"),
    ("flowspec.model.layers.block", "LayerBlock._mask", "mask"),
    ("flowspec.model.drafters.eagle", "full_mask", "mask"),
    ("flowspec.model.layers.lean", "LeanLayers.run", "layers"),
    ("flowspec.model.drafters.eagle", "EagleHead.forward", INPUTS),
    ("flowspec.model.rows.kv", "TreeCache.slots", "KV rows"),
    ("flowspec.model.rows.kv", "TreeCacheLayer.update", "KV rows"),
    ("flowspec.model.layers.linear", "KernelLinear.multiply", "linears"),
    ("flowspec.model.layers.lean", "attend", "attention"),
    ("flowspec.model.kernels.attention", "ExactAttention.into", "attention"),
    ("flowspec.model.drafters.language_model", "propose", "proposals"),
    ("flowspec.model.drafters.eagle", "propose", "proposals"),
)
#: Every part in the order of the tables, and what it is.
PARTS = {
    "read, codec": "reading streams, decoding messages and rows, trims",
    "machine": "the role's machine",
    "places, KV moves": "places of the rows, moves after a prune",
    "mask": "from parent links, and as attention takes it",
    INPUTS: "tensors of positions, tokens and rows; checks; the executor",
    "layers": "norms, rotation, views, additions, Python of the layers",
    "KV rows": "appending keys and values",
    "linears": "kernels of the linear layers, the head's among them",
    "attention": "scores, softmax and weighted sum",
    "proposals": "the best tokens and their values",
    "codec, write": "encoding, sending, taking answers",
    LOOP: "the rest of the worker's loop",
}

Taken = dict[str, float]


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of a pass: by part, whole without the parts' clocks, and of other threads."""

    parts: Mapping[str, float]
    whole: float
    beside: float = 0.0


class Rounds:
    """Seconds of every round, with the clocks of the parts running in every second one."""

    def __init__(self) -> None:
        self.sections = Sections()
        self._parts: list[Taken] = []
        self._whole: list[float] = []
        self._beside: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self.sections.seconds.clear()
        self.sections.running = not self.sections.running
        self._process = time.process_time()
        self._thread = time.thread_time()

    def end(self) -> None:
        """End a round and begin the next."""
        taken = time.thread_time() - self._thread
        if self.sections.running:
            self._parts.append(dict(self.sections.seconds))
        else:
            self._whole.append(taken)
            self._beside.append(time.process_time() - self._process - taken)
        self._begin()

    def account(self) -> Account:
        """Medians without the first rounds."""
        parts = self._parts[WARM // 2 :]
        found = {
            part: statistics.median(one.get(part, 0.0) for one in parts)
            for part in PARTS
            if any(part in one for one in parts)
        }
        skipped = WARM // 2
        return Account(
            found,
            statistics.median(self._whole[skipped:]),
            statistics.median(self._beside[skipped:]),
        )


def instrument(sections: Sections) -> None:
    """Make everything in TIMED a section, for the rest of the process."""
    for place, path, part in TIMED:
        owner: Any = importlib.import_module(place)
        *outer, name = path.split(".")
        for attribute in outer:
            owner = getattr(owner, attribute)
        setattr(owner, name, sections.timed(part, getattr(owner, name)))


def stage_process(url: str, model: str, layers: range, dtype: str, pipe: Any) -> None:
    """The measured worker; it sends its account when it is told to stop."""
    import torch

    from flowspec.model.layers.placing import place
    from flowspec.model.stage import load_stage

    observe.configure()
    torch.set_num_threads(1)
    rounds = Rounds()
    instrument(rounds.sections)
    directory = open_directory(model)
    stage = load_stage(directory, layers, placing=place(dtype, "cpu", directory.config))
    link = hop.stage_link(url, MEASURED, "straight", STAGES)
    performer = VerifyPerformer(stage, (directory.hidden_size,))
    worker = Worker(StageMachine(MEASURED, STAGES), link, performer)
    cycle = rounds.sections.timed(LOOP, worker.cycle)
    pipe.send("ready")
    while not pipe.poll():
        before = worker.passes
        cycle()
        if worker.passes > before:
            rounds.end()
    pipe.send(rounds.account())
    link.close()


def _start(process: mp.Process, theirs: Any) -> None:
    """Start ``process``, which alone has ``theirs`` then: its end is seen at the other one."""
    process.daemon = True
    process.start()
    theirs.close()


def _said(end: Any) -> Any:
    """What a process sends; SystemExit if it has ended instead."""
    try:
        return end.recv()
    except EOFError:
        sys.exit("pass_account: a measured process has ended; its own words are above")


def stage_account(model: str, layers: range, dtype: str, rows: int, rounds: int) -> Account:
    """A pass over ``rows`` rows of the middle stage, with ``layers`` of ``model``."""
    hidden = open_directory(model).hidden_size
    ends = []
    processes = []
    with PrivateBroker() as broker:
        url = broker.url
        hop.announce(url, STAGES)
        for number in range(STAGES, 0, -1):  # a stage must be announced before the one ahead of it
            ours, theirs = mp.Pipe()
            if number == MEASURED:
                process = mp.Process(target=stage_process, args=(url, model, layers, dtype, theirs))
            else:
                process = mp.Process(
                    target=hop.stage_process, args=(url, number, "straight", hidden, theirs, STAGES)
                )
            _start(process, theirs)
            _said(ours)
            ends.append(ours)
            processes.append(process)
        hop.drive(url, rounds + WARM, count=STAGES, width=rows)
        found = []
        for end, process in zip(ends, processes, strict=True):
            end.send("stop")
            found.append(_said(end))
            process.join()
    account = found[STAGES - MEASURED]
    assert isinstance(account, Account)
    return account


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
        drafter.allocate(KEPT, context + nodes + 1, Sampling(), Returns())
        if drafter.wants_hidden:
            drafter.learn(
                KEPT, range(context), drawn.standard_normal((context, hidden), np.float32)
            )
        self._pass(range(context), (), None)

    def draft(self) -> None:
        """One pass over all nodes; it prunes the rows of the one before."""
        ids = range(self._context, self._context + self._nodes)
        self._pass(ids, tuple(range(self._nodes)), Pruned((), ()))

    def _pass(self, ids: Sequence[int], answers: tuple[int, ...], pruned: Pruned | None) -> None:
        context = self._context
        part = Part(
            run=KEPT,
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
        self._drafter.run(Draft(part, WIDTH))


def draft_process(source: str, rows: int, rounds: int, pipe: Any) -> None:
    """A step of the drafter ``source`` for ``rows`` nodes of a level."""
    import torch

    torch.set_num_threads(1)
    taken = Rounds()
    instrument(taken.sections)
    from flowspec.model.drafters.sources import load_sources

    target = open_directory(default_pair()[0])
    drafter = load_sources(source, target, dtype=AUTO)
    level = Level(drafter, target.vocabulary, target.hidden_size, CONTEXT, rows)
    for _ in range(rounds + WARM):
        level.draft()
        taken.end()
    pipe.send(taken.account())


def draft_account(source: str, rows: int, rounds: int) -> Account:
    """As ``draft_process``, in a process of its own."""
    ours, theirs = mp.Pipe()
    process = mp.Process(target=draft_process, args=(source, rows, rounds, theirs))
    _start(process, theirs)
    account = _said(ours)
    process.join()
    assert isinstance(account, Account)
    return account


def table(found: Mapping[int, Account]) -> list[str]:
    """Milliseconds by part, a column for each number of rows."""
    heads = [f"{rows} {'row' if rows == 1 else 'rows'}, ms" for rows in found]
    lines = [f"| part | {' | '.join(heads)} | what |", "|---" * (len(heads) + 2) + "|"]

    def line(name: str, values: Sequence[float], what: str) -> str:
        cells = " | ".join(f"{seconds * 1e3:.2f}" for seconds in values)
        return f"| {name} | {cells} | {what} |"

    accounts = list(found.values())
    for part, what in PARTS.items():
        if any(part in account.parts for account in accounts):
            lines.append(line(part, [one.parts.get(part, 0.0) for one in accounts], what))
    lines.append(line("sum", [sum(one.parts.values()) for one in accounts], ""))
    lines.append(line("measured", [one.whole for one in accounts], "without the parts' clocks"))
    beside = [one.beside for one in accounts]
    if LOOP in accounts[0].parts:
        lines.append(line("other threads", beside, "of the same process, beside the pass"))
    return lines


def report(model: str, rows: Sequence[int], rounds: int) -> None:
    """All tables."""
    four_bits = "nf4" if served("nf4", "cpu") else "int4"
    stages: tuple[tuple[str, str, range, str], ...] = (
        ("The packaged target, 4 of 12 layers, float32", default_pair()[0], range(4, 8), "float32"),
        (f"A 1B-class model, 2 layers, {four_bits}", model, range(1, 3), four_bits),
    )
    tables: dict[str, Callable[[int], Account]] = {}
    for title, path, layers, dtype in stages:
        tables[title] = _stage(path, layers, dtype, rounds)
    for source, title in (("head", "the packaged head"), ("draft", "the packaged small model")):
        tables[f"A step of {title}"] = _draft(source, rounds)
    print(f"{machine_line()}; load {os.getloadavg()[0]:.1f} of other work at the start")
    for title, account in tables.items():
        print(f"\n### {title}\n")
        print("\n".join(table({many: account(many) for many in rows})), flush=True)


def _stage(path: str, layers: range, dtype: str, rounds: int) -> Callable[[int], Account]:
    return lambda rows: stage_account(path, layers, dtype, rows, rounds)


def _draft(source: str, rounds: int) -> Callable[[int], Account]:
    return lambda rows: draft_account(source, rows, rounds)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a model with at least 3 layers, in four bits")
    parser.add_argument("--rounds", type=count, default=80)
    parser.add_argument("--rows", type=counts, default="1,16")
    given = parser.parse_args()
    try:
        model = given.model or random_model(Shape(layers=4))
        report(str(model), given.rows, given.rounds)
    except FlowSpecError as error:
        sys.exit(f"pass_account: {error}")


if __name__ == "__main__":
    main()
