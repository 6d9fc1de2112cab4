"""One shard of a 1B-class Llama in every precision: bytes, pass times, perplexity, row equality.

    python -m ops.bench.shard [--precisions float32,...] [--model FOLDER] [--rows 1,4,16,64]
        [--context 256] [--rounds 15] [--text FILE,...] [--target FOLDER]
    python -m ops.bench.shard --kernels [--rounds 15] [--target FOLDER]
    python -m ops.bench.shard --head [--precisions ...] [--text FILE,...] [--target FOLDER]
    python -m ops.bench.shard --alone [--precisions ...] [--text FILE] [--texts 8] [--tokens 128]
        [--target FOLDER]

The shard has four layers (hidden 2048, intermediate 8192, 32 heads, 8 KV heads) and an LM head of
32,000 tokens, random weights in bfloat16; ``--model`` names a folder where they are written once,
otherwise they are temporary. Every precision has a process of its own, and all of them take turns,
so that what else the machine does hits all alike. Times are CPU time of one torch thread, medians
over the rounds. The perplexity is of ``--target``, the packaged one or any other folder.
``--kernels``: every kernel of this machine on the seven linears of a layer, of the shard or of
``--target``. ``--head``: what the precision of the LM head costs. ``--alone``: rows of
the target's text in shared passes against lone rows. Prints Markdown
(``ops/bench/results/shard.md``, ``kernels.md`` and ``row-independence.md`` there).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.kernels import served
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.weights.precision import PRECISIONS
from ops.bench import kernel_times, lone_rows, text_loss
from ops.bench.arguments import count
from ops.bench.shard_model import LINEARS, linears_of, write_model
from ops.bench.shard_process import Loaded, ShardProcess

PACKAGED = default_pair()[0]
PROMPTS = Path("tests/data/prompts.jsonl")
#: Tokens of a text file for the perplexity, in whole prompts.
MOST_TOKENS = 8192
#: Rows of a shared pass of ``--alone``.
WIDTH = 16


@dataclass(frozen=True, slots=True)
class MeasuredShard:
    """A precision's shard: what its load took, and median seconds by rows."""

    loaded: Loaded
    seconds: Mapping[int, float]


def measured(
    folder: Path, precisions: Sequence[str], context: int, rows: Sequence[int], rounds: int
) -> dict[str, MeasuredShard]:
    """Load a shard per precision, one after another, then time them in turns."""
    with ExitStack() as stack:
        shards = {}
        for precision in precisions:
            _say(f"loading {precision}")
            shards[precision] = stack.enter_context(ShardProcess(folder, precision, context, rows))
        turns: dict[str, list[dict[int, float]]] = {precision: [] for precision in precisions}
        for at in range(rounds):
            _say(f"round {at + 1} of {rounds}")
            for precision, shard in shards.items():
                turns[precision].append(shard.turn())
    return {
        precision: MeasuredShard(
            shard.loaded,
            {n: statistics.median(turn[n] for turn in turns[precision]) for n in rows},
        )
        for precision, shard in shards.items()
    }


def losses(
    directory: ModelDirectory, precisions: Sequence[str], files: Sequence[Path]
) -> tuple[list[int], dict[str, list[tuple[float, float]]]]:
    """Tokens predicted of every file, and the mean nats by precision: ours and the library's."""
    texts = [text_loss.pieces(directory, file, MOST_TOKENS) for file in files]
    found = {}
    for precision in precisions:
        _say(f"perplexity in {precision}")
        block = text_loss.load_target(directory, Placing(precision))
        ours = [text_loss.loss(block, its) for its in texts]
        del block
        library = text_loss.load_library(directory, precision)
        theirs = [text_loss.library_loss(library, its) for its in texts]
        found[precision] = list(zip(ours, theirs, strict=True))
    return [sum(len(piece) - 1 for piece in its) for its in texts], found


def table(
    shards: Mapping[str, MeasuredShard],
    rows: Sequence[int],
    names: Sequence[str],
    nats: Mapping[str, Sequence[tuple[float, float]]],
) -> Iterator[str]:
    """Markdown: a row per precision."""
    times = [f"t({n}), ms" for n in rows]
    texts = [f"perplexity, {name}" for name in names]
    columns = ["precision", "kernels", "weights, MiB", "peak over weights", *times, *texts]
    yield f"| {' | '.join(columns)} | rows independent |"
    yield "|---" * (len(columns) + 1) + "|"
    for precision, shard in shards.items():
        loaded = shard.loaded
        cells = [
            precision,
            ", ".join(loaded.kernels),
            f"{loaded.nbytes / 2**20:.0f}",
            f"{loaded.peak / loaded.nbytes:.2f}",
            *(f"{shard.seconds[n] * 1e3:.0f}" for n in rows),
            *(f"{math.exp(ours):.3f}, {math.exp(theirs):.3f}" for ours, theirs in nats[precision]),
            "yes" if not loaded.dependent else f"no: {', '.join(loaded.dependent)}",
        ]
        yield f"| {' | '.join(cells)} |"


def shard_page(given: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The table with its explanation."""
    shards = measured(folder, given.precisions, given.context, given.rows, given.rounds)
    target = open_directory(given.target)
    counts, nats = losses(target, given.precisions, given.text)
    yield (
        f"*t(n)*: CPU time of a pass of n siblings after {given.context} rows of context through "
        f"the layers and the LM head, one torch thread, median of {given.rounds}. *Peak over "
        "weights*: resident memory at its highest while loading, above that after imports, over "
        f"the weights' bytes. *Perplexity*: of {target.path.name}, without chat template, in "
        f"pieces of {text_loss.CONTEXT} tokens, and by the library's own layers with the same "
        "quantised values: "
        + "; ".join(
            f"{file}, {tokens} tokens" for file, tokens in zip(given.text, counts, strict=True)
        )
        + ". *Rows independent*: same bits whatever shares their pass."
    )
    yield ""
    yield from table(shards, given.rows, [file.stem for file in given.text], nats)


def kernels_page(given: argparse.Namespace) -> Iterator[str]:
    """The table of kernels with its explanation."""
    shapes = LINEARS if given.target == PACKAGED else linears_of(open_directory(given.target))
    yield (
        "Milliseconds of CPU time for the seven linears of a layer by number of rows, one torch "
        f"thread, median of {given.rounds} in changing order. *Rows independent*: every linear "
        "gives a row the same bits whatever shares its pass."
    )
    yield ""
    yield from kernel_times.table(shapes, given.rounds)


class WholeHead(Placing):
    """As ``precision``, but for an LM head in float32."""

    @property
    def head(self) -> str:
        return "float32"

    @property
    def head_rows(self) -> torch.dtype:
        return torch.float32


def head_page(given: argparse.Namespace) -> Iterator[str]:
    """The table of heads with its explanation."""
    target = open_directory(given.target)
    texts = [text_loss.pieces(target, file, MOST_TOKENS) for file in given.text]
    counts = [sum(len(piece) - 1 for piece in its) for its in texts]
    names = [
        f"{file.stem}, {tokens} tokens" for file, tokens in zip(given.text, counts, strict=True)
    ]
    yield (
        f"Perplexity of {target.path.name} with the LM head as the precision has it, over that "
        "with the same layers and a head in float32, less one."
    )
    yield ""
    yield f"| precision | head | {' | '.join(names)} | all |"
    yield "|---" * (len(names) + 3) + "|"
    for precision in given.precisions:
        if not PRECISIONS[precision].quantised:
            continue
        _say(f"perplexity in {precision}")
        blocks = [text_loss.load_target(target, kind(precision)) for kind in (Placing, WholeHead)]
        more = [text_loss.loss(blocks[0], its) - text_loss.loss(blocks[1], its) for its in texts]
        every = sum(nats * tokens for nats, tokens in zip(more, counts, strict=True)) / sum(counts)
        cells = (f"{math.expm1(nats) * 100:+.2f}%" for nats in (*more, every))
        yield f"| {precision} | {Placing(precision).head} | {' | '.join(cells)} |"


def alone_page(given: argparse.Namespace) -> Iterator[str]:
    """The table of lone and shared rows with its explanation."""
    yield (
        f"The own greedy text of {Path(given.target).name} after {given.texts} prompts, up to "
        f"{given.tokens} tokens each: rows in passes of {WIDTH} against the same rows in passes of "
        "one. *Equal rows*: hidden row and logits have the same bits. *Largest difference*: of two "
        "logits. *Other best*: rows whose best token differs."
    )
    yield ""
    yield from lone_rows.table(
        open_directory(given.target),
        *(given.precisions, given.text[0], given.texts, given.tokens, WIDTH),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def precisions_here(text: str) -> list[str]:
    """Precisions by commas, those that run on this processor."""
    names = text.split(",")
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r}, expected some of {', '.join(PRECISIONS)}, by commas"
        )
    return [name for name in names if served(name, "cpu")]


def _counts(text: str) -> list[int]:
    with contextlib.suppress(argparse.ArgumentTypeError):
        return [count(part) for part in text.split(",")]
    raise argparse.ArgumentTypeError(f"{text!r}, expected integers of at least 1, by commas")


def _files(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def pages(given: argparse.Namespace) -> Iterator[str]:
    """The lines of the page that was asked for."""
    if given.kernels:
        yield from kernels_page(given)
    elif given.head:
        yield from head_page(given)
    elif given.alone:
        yield from alone_page(given)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = given.model or Path(temporary)
            if not (folder / "config.json").exists():
                write_model(folder)
            yield from shard_page(given, folder)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--precisions", type=precisions_here, default=",".join(PRECISIONS), help="by commas (all)")
    add("--target", default=PACKAGED, metavar="FOLDER", help="(the packaged one)")
    add("--model", type=Path, metavar="FOLDER", help="where the weights are, or are written")
    add("--rows", type=_counts, default="1,4,16,64", help="by commas (1,4,16,64)")
    add("--context", type=count, default=256, help="rows before those of a pass (256)")
    add("--rounds", type=count, default=15, help="passes of every kind (15)")
    add("--text", type=_files, default=str(PROMPTS), help=f"JSON lines, by commas ({PROMPTS})")
    add("--texts", type=count, default=8, help="of --alone (8)")
    add("--tokens", type=count, default=128, help="of every text of --alone (128)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--kernels", action="store_true", help="the kernels by themselves")
    other.add_argument("--head", action="store_true", help="what the LM head's precision costs")
    other.add_argument("--alone", action="store_true", help="lone rows against shared ones")
    given = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if not given.precisions:
            raise ConfigError(
                "none of these precisions runs on this processor; see flowspec doctor"
            )
        for line in pages(given):
            print(line, flush=True)
    except FlowSpecError as error:
        sys.exit(f"shard: {error}")


if __name__ == "__main__":
    main()
