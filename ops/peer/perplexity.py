"""Perplexity of a GGUF file as it is read here, and by llama.cpp: the same text in the same pieces.

    make peer; python -m ops.peer.perplexity --target FILE.gguf --prompts FILE.jsonl
                                             [--dtypes float32,int4] [--peer .peer]

The text is that of all prompts, without a chat template, in pieces of 512 tokens, of which each
predicts its second half: what ``llama-perplexity`` does. Prints Markdown.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from flowspec.cli.generate import read_prompts
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import ModelDirectory, open_directory
from ops.bench.text_loss import CONTEXT, load_target, loss
from ops.parser import Parser
from ops.peer.install import DEFAULT_FOLDER, Peer, version
from ops.peer.llama import Llama


def pieces(directory: ModelDirectory, text: str) -> list[tuple[int, ...]]:
    """The whole pieces of ``text``; one that begins with a special token has it in each."""
    tokenizer = Tokenizer(directory)
    tokens = tokenizer.encode(text, raw=True)
    first = tokens[:1] if tokenizer.detokenizer.token(tokens[0]).special else ()
    found = [tokens[at : at + CONTEXT] for at in range(0, len(tokens) - CONTEXT + 1, CONTEXT)]
    if not found:
        raise ConfigError(f"the text has {len(tokens)} tokens; give {CONTEXT} or more")
    return [(*first, *piece[len(first) :]) for piece in found]


def perplexity(block: LayerBlock, texts: Sequence[tuple[int, ...]]) -> float:
    """Of the second halves of ``texts``, each behind its first half."""
    return math.exp(loss(block, texts, behind=CONTEXT // 2))


def table(peer: Peer, target: Path, prompts: Path, dtypes: Sequence[str]) -> Iterator[str]:
    """A row for each precision, and llama.cpp's."""
    directory = open_directory(str(target))
    text = "\n\n".join(read_prompts(prompts))
    texts = pieces(directory, text)
    yield (
        f"{target.name}, {prompts.name}, {len(texts)} pieces of {CONTEXT} tokens; llama.cpp of "
        f"llama-cpp-python {version()}\n\n| read by | perplexity |\n|---|---|"
    )
    for dtype in dtypes:
        block = load_target(directory, Placing(dtype))
        yield f"| ours, {dtype} by {'+'.join(block.kernels)} | {perplexity(block, texts):.4f} |"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text(text, encoding="utf-8")
        llama = Llama(peer, (), directory.layers, CONTEXT, target)
        yield f"| llama.cpp | {llama.perplexity(file, len(texts)):.4f} |"


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="FILE.gguf")
    add("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    add("--dtypes", default="float32,int4", help="by commas (float32,int4)")
    add("--peer", type=Path, default=DEFAULT_FOLDER, help="the folder of `make peer`")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        for line in table(Peer(given.peer), given.target, given.prompts, given.dtypes.split(",")):
            print(line, flush=True)
    except FlowSpecError as error:
        sys.exit(f"perplexity: {error}")


if __name__ == "__main__":
    main()
