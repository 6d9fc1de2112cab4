"""Perplexity of a model on given texts, in any precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flowspec.cli.generate import read_prompts
from flowspec.model.block import LayerBlock
from flowspec.model.directory import ModelDirectory
from flowspec.model.placing import Placing
from flowspec.model.text import Tokenizer
from flowspec.testbed.proof.plain import Rows

#: Tokens that a text is cut into; each piece is predicted from itself alone.
CONTEXT = 512
#: Most rows of a pass.
PASS_ROWS = 256


def load_target(directory: ModelDirectory, precision: str) -> LayerBlock:
    """The whole model in one block."""
    layers = range(directory.layers)
    return LayerBlock(directory, layers, first=True, last=True, placing=Placing(precision))


def pieces(directory: ModelDirectory, file: Path, most: int) -> list[tuple[int, ...]]:
    """The prompts of ``file`` without a chat template, cut to ``CONTEXT`` tokens.

    Whole prompts, in order, until there are ``most`` tokens.
    """
    tokenizer = Tokenizer(directory)
    found: list[tuple[int, ...]] = []
    for prompt in read_prompts(file):
        if sum(map(len, found)) >= most:
            break
        tokens = tokenizer.encode(prompt, raw=True)
        found += [tokens[at : at + CONTEXT] for at in range(0, len(tokens), CONTEXT)]
    return found


def loss(block: LayerBlock, texts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Mean nats of every token of ``texts`` but the first of each, and the number of these."""
    nats = 0.0
    count = 0
    for tokens in texts:
        rows = Rows([block], len(tokens))
        for at in range(0, len(tokens) - 1, PASS_ROWS):
            given = tokens[at : min(at + PASS_ROWS, len(tokens) - 1)]
            following = torch.tensor(tokens[at + 1 : at + 1 + len(given)])
            logits = block.logits(rows.take(given)).double()
            nats += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
            count += len(given)
    return nats / count, count
