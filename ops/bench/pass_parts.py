"""Where the time of one pass over a whole model goes, in one process without a pipeline.

    python -m ops.bench.pass_parts --model DIR [--dtypes nf4,int4] [--rows 1,4,16] [--repeats 15]
        [--turns N]

The executor of a one-stage pipeline runs passes of tree rows over a context of 64 rows. Every
linear layer, norm, activation and attention call reads the clock before and after; a part's time
is without that of the parts inside it, and *library* is what is left of the layers: the library's
Python, reshaping and additions. The product runs a shorter path, whose parts follow; passes come
without a pause, but for one row of the table. CPU seconds of the thread, which other work on the
machine changes little; medians over passes, one thread.

``--turns``: so many times before, with the first of ``--dtypes``, in turn with llama.cpp's own
passes over the same GGUF file (``make peer``): real seconds, one thread. Prints Markdown.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AttentionInterface

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pass, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError
from flowspec.model import stage as stage_module
from flowspec.model.kernels.layers import CompiledLayers
from flowspec.model.layers.lean import COMPILED
from flowspec.model.layers.placing import place
from flowspec.model.rows.kv import TreeCacheLayer
from flowspec.model.stage import ModelStage, load_stage
from flowspec.model.weights.directory import open_directory
from ops.bench.arguments import count, counts
from ops.peer.batches import pass_seconds
from ops.peer.install import DEFAULT_FOLDER, Peer

CONTEXT = 64
#: Before a pass that counts as one after a pause, seconds.
PAUSE = 0.012
#: Passes of each number of rows in a turn with llama.cpp.
PASSES = 40
#: Parts of a pass in the order of the table: name, and what it is.
PARTS = {
    "q, k, v, o": "linear layers of the attention",
    "gate, up, down": "linear layers of the feed-forward part",
    "head": "the LM head's product",
    "attention": "scores, softmax and weighted sum, in float64",
    "norms": "the library's RMSNorm",
    "activation": "SiLU and its product with `up`",
    "rotary": "angles, and their application to queries and keys",
    "KV rows": "appending keys and values",
    "library": "the rest of the library's layers: calls, views, residual additions",
    "mask": "mask, input tensors",
    "sampling": "argmax over the logits",
    "stage": "places of the rows, the rest of the executor",
}
#: The same of the short path.
SHORT = {
    "layers": "in C, one call: norms, products, rotary, attention, activation, additions",
    "head": "the LM head's product",
    "mask": "mask, input tensors, angles, norm",
    "sampling": "argmax over the logits",
    "stage": "places of the rows, KV rows, the rest of the executor",
}


class Sections:
    """Seconds by section; a section's seconds are without those of the sections inside it.

    ``running``: whether the clock is read.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running = True
        self._clock = clock
        self._inner: list[float] = []  # seconds of inner sections, by open section

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as a section ``name``."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return function(*args, **kwargs)
            self._inner.append(0.0)
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                taken = self._clock() - began
                self.seconds[name] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return measured


def section_of(name: str, module: torch.nn.Module) -> str | None:
    """The section of the block's module ``name``; None: it is part of the one around it."""
    leaf = name.rpartition(".")[2]
    if name == "head":
        return "head"
    if leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return "q, k, v, o"
    if leaf in ("gate_proj", "up_proj", "down_proj"):
        return "gate, up, down"
    if leaf == "norm" or leaf.endswith("layernorm"):
        return "norms"
    named = {"mlp": "activation", "rotary_emb": "rotary", "body": "library"}
    return named.get(leaf)


class _Replaced(contextlib.ExitStack):
    """Functions that are timed in place of themselves, until it is left."""

    def __init__(self, sections: Sections) -> None:
        super().__init__()
        self._sections = sections

    def time(self, owner: Any, attribute: str, name: str) -> None:
        """Make ``owner.attribute`` a section ``name``."""
        before = getattr(owner, attribute)
        setattr(owner, attribute, self._sections.timed(name, before))
        self.callback(setattr, owner, attribute, before)


@contextlib.contextmanager
def measured(stage: ModelStage, sections: Sections) -> Iterator[Callable[..., Any]]:
    """``stage.run`` with every part of it a section."""
    block = stage.block
    with _Replaced(sections) as replaced:
        for name, module in block.named_modules():
            section = section_of(name, module)
            if section is not None:
                replaced.time(module, "forward", section)
        replaced.time(TreeCacheLayer, "update", "KV rows")
        replaced.time(stage_module, "choose_rows", "sampling")
        replaced.time(block, "run_together", "mask")
        modeling = sys.modules[type(block.body).__module__]
        if hasattr(modeling, "apply_rotary_pos_emb"):
            replaced.time(modeling, "apply_rotary_pos_emb", "rotary")
        chosen = block.config._attn_implementation
        known = AttentionInterface()
        before = known[chosen]
        AttentionInterface.register(chosen, sections.timed("attention", before))
        replaced.callback(AttentionInterface.register, chosen, before)
        yield sections.timed("stage", stage.run)


@contextlib.contextmanager
def measured_short(stage: ModelStage, sections: Sections) -> Iterator[Callable[..., Any]]:
    """``stage.run`` by the short path with every part of it a section."""
    with _Replaced(sections) as replaced:
        replaced.time(CompiledLayers, "_run", "layers")
        replaced.time(stage.block.lean, "head", "head")
        replaced.time(stage.block, "run_together", "mask")
        replaced.time(stage_module, "choose_rows", "sampling")
        yield sections.timed("stage", stage.run)


class Passes:
    """Passes of tree rows at a fixed context of ``CONTEXT`` rows of an executor's only run."""

    def __init__(self, stage: ModelStage, vocabulary: int) -> None:
        self._stage = stage
        self._vocabulary = vocabulary
        self._run = RunKey("parts", 1)
        self._next = CONTEXT
        self._last: tuple[int, ...] = ()
        stage.allocate(self._run, 2 * CONTEXT, Sampling(), Returns())
        ids = tuple(range(CONTEXT))
        self._pass(stage.run, ids, tuple(at - 1 for at in ids), ids, CONTEXT, None)

    def step(self, run: Callable[..., Any], rows: int) -> float:
        """Seconds of a pass over a chain of ``rows`` rows by ``run``; the next drops them."""
        ids = tuple(range(self._next, self._next + rows))
        parents = (CONTEXT - 1, *ids[:-1])
        positions = tuple(range(CONTEXT, CONTEXT + rows))
        pruned = Pruned((), ()) if self._last else None
        self._next += rows
        self._last = ids
        return self._pass(run, ids, parents, positions, 0, pruned)

    def _pass(
        self,
        run: Callable[..., Any],
        ids: tuple[int, ...],
        parents: tuple[int, ...],
        positions: tuple[int, ...],
        context: int,
        pruned: Pruned | None,
    ) -> float:
        tokens = tuple(7 * node % self._vocabulary for node in ids)
        offsets = tuple(range(len(ids)))
        answers = offsets if not context else offsets[-1:]
        part = Part(
            self._run,
            *(0, ids, parents, positions, tokens, offsets),
            context=context,
            pruned=pruned,
            answers=answers,
        )
        began = time.thread_time()
        run(Pass((part,)), [None])
        return time.thread_time() - began


def taken(
    stage: ModelStage, vocabulary: int, rows: Sequence[int], repeats: int
) -> dict[int, dict[str, float]]:
    """Median seconds by number of rows and part, by the library's layers.

    ``whole``: of a pass without clocks inside; ``short``: by the short path
    (``model.layers.lean``), if the stage has one; ``paused``: so, each after a pause.
    """
    passes = Passes(stage, vocabulary)
    short_path = stage.block.lean
    found = {}
    for many in rows:
        passes.step(stage.run, many)
        short = [passes.step(stage.run, many) for _ in range(repeats)]
        paused = []
        for _ in range(repeats):
            time.sleep(PAUSE)
            paused.append(passes.step(stage.run, many))
        short_series = []
        compiled = short_path is not None and short_path.name == COMPILED
        for _ in range(repeats if compiled else 0):
            sections = Sections()
            with measured_short(stage, sections) as run:
                passes.step(run, many)
            short_series.append(sections.seconds)
        stage.block.lean = None
        passes.step(stage.run, many)
        whole = [passes.step(stage.run, many) for _ in range(repeats)]
        series = []
        for _ in range(repeats):
            sections = Sections()
            with measured(stage, sections) as run:
                passes.step(run, many)
            series.append(sections.seconds)
        found[many] = {
            **{part: statistics.median(one[part] for one in series) for part in PARTS},
            "whole": statistics.median(whole),
            "short": statistics.median(short),
            "paused": statistics.median(paused),
            **{
                f"short, {part}": statistics.median(one[part] for one in short_series)
                for part in (SHORT if short_series else ())
            },
        }
        stage.block.lean = short_path
    return found


def table(found: Mapping[tuple[str, int], Mapping[str, float]]) -> list[str]:
    """Milliseconds by part, a column for each precision and number of rows."""
    heads = [f"{dtype}, {rows} {'row' if rows == 1 else 'rows'}" for dtype, rows in found]
    lines = [f"| part, ms | {' | '.join(heads)} | what |", "|---" * (len(heads) + 2) + "|"]
    for part, what in PARTS.items():
        cells = [f"{seconds[part] * 1e3:.2f}" for seconds in found.values()]
        lines.append(f"| {part} | {' | '.join(cells)} | {what} |")
    sums = [f"{sum(seconds[part] for part in PARTS) * 1e3:.1f}" for seconds in found.values()]
    lines.append(f"| sum | {' | '.join(sums)} | |")
    wholes = {
        "whole": ("whole pass", "without the clocks inside"),
        "short": ("by the short path", "as the product runs it"),
        "paused": (
            f"after {PAUSE * 1e3:g} ms",
            "the same, each after a pause, as where a stage waits for its turn",
        ),
    }
    for key, (part, what) in wholes.items():
        cells = [f"{seconds[key] * 1e3:.1f}" for seconds in found.values()]
        lines.append(f"| {part} | {' | '.join(cells)} | {what} |")
    for part, what in SHORT.items():
        times = [seconds.get(f"short, {part}") for seconds in found.values()]
        cells = ["" if time is None else f"{time * 1e3:.2f}" for time in times]
        lines.append(f"| its {part} | {' | '.join(cells)} | {what} |")
    return lines


def in_turn(
    ours: Callable[[int], float],
    theirs: Callable[[], Mapping[int, float]],
    rows: Sequence[int],
    turns: int,
) -> dict[int, list[tuple[float, float]]]:
    """Seconds of a pass of either side by number of rows, one pair a turn."""
    found: dict[int, list[tuple[float, float]]] = {many: [] for many in rows}
    for _ in range(turns):
        beside = theirs()
        for many in rows:
            found[many].append((ours(many), beside[many]))
    return found


def turns_table(found: Mapping[int, Sequence[tuple[float, float]]]) -> list[str]:
    """Milliseconds of a pass of either side, and their ratio: medians over the turns."""
    heads = [f"{rows} {'row' if rows == 1 else 'rows'}" for rows in found]
    lines = [f"| ms a pass | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for side, name in enumerate(("ours", "llama.cpp")):
        medians = [statistics.median(pair[side] for pair in pairs) for pairs in found.values()]
        lines.append(f"| {name} | {' | '.join(f'{one * 1e3:.1f}' for one in medians)} |")
    cells = []
    for pairs in found.values():
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    lines.append(f"| ours over theirs, least to most | {' | '.join(cells)} |")
    return lines


def beside_peer(
    peer: Peer, model: Path, dtype: str, rows: Sequence[int], turns: int
) -> dict[int, list[tuple[float, float]]]:
    """``in_turn`` for a GGUF file, in one process each; a turn's time is the mean of ``PASSES``."""
    directory = open_directory(str(model))
    stage = load_stage(
        directory, range(directory.layers), placing=place(dtype, "cpu", directory.config)
    )
    passes = Passes(stage, directory.vocabulary)

    def ours(many: int) -> float:
        passes.step(stage.run, many)
        began = time.perf_counter()
        for _ in range(PASSES):
            passes.step(stage.run, many)
        return (time.perf_counter() - began) / PASSES

    def theirs() -> Mapping[int, float]:
        return pass_seconds(peer, model, (), 0, rows, prompt=CONTEXT, passes=PASSES)

    return in_turn(ours, theirs, rows, turns)


def broken_down(
    model: Path, dtypes: Sequence[str], rows: Sequence[int], repeats: int
) -> dict[tuple[str, int], dict[str, float]]:
    """Median seconds by part, for every precision and number of rows."""
    directory = open_directory(str(model))
    found = {}
    for dtype in dtypes:
        placing = place(dtype, "cpu", directory.config)
        stage = load_stage(directory, range(directory.layers), placing=placing)
        for many, seconds in taken(stage, directory.vocabulary, rows, repeats).items():
            found[dtype, many] = seconds
        del stage
    return found


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtypes", default="nf4,int4")
    parser.add_argument("--rows", type=counts, default="1,4,16")
    parser.add_argument("--repeats", type=count, default=15)
    parser.add_argument("--turns", type=count, help="first beside llama.cpp, so often")
    given = parser.parse_args()
    torch.set_num_threads(1)
    try:
        dtypes = given.dtypes.split(",")
        if given.turns:
            peer = Peer(DEFAULT_FOLDER)
            peer.check()
            pairs = beside_peer(peer, given.model, dtypes[0], given.rows, given.turns)
            print("\n".join([*turns_table(pairs), ""]))
        found = broken_down(given.model, dtypes, given.rows, given.repeats)
        print("\n".join(table(found)))
    except FlowSpecError as error:
        sys.exit(f"pass_parts: {error}")


if __name__ == "__main__":
    main()
