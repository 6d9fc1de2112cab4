"""Perplexity of a model on given texts, in any precision: by our layers and by the library's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flowspec.cli.generate import read_prompts
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import ModelDirectory
from flowspec.proof.library import Library
from flowspec.proof.plain import Rows

#: Tokens that a text is cut into; each piece is predicted from itself alone.
CONTEXT = 512
#: Most rows of a pass.
PASS_ROWS = 256


def load_target(directory: ModelDirectory, placing: Placing) -> LayerBlock:
    """The whole model in one block."""
    layers = range(directory.layers)
    return LayerBlock(directory, layers, first=True, last=True, placing=placing)


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


def loss(block: LayerBlock, texts: Sequence[Sequence[int]], behind: int = 0) -> float:
    """Mean nats of every token of ``texts`` but the first of each.

    ``behind``: rows at the beginning of each that predict nothing, in whole passes.
    """
    nats = []
    for tokens in texts:
        rows = Rows([block], len(tokens))
        for at in range(0, len(tokens) - 1, PASS_ROWS):
            given = tokens[at : min(at + PASS_ROWS, len(tokens) - 1)]
            hidden = rows.take(given)
            if at >= behind:
                nats.append(_nats(block.logits(hidden), tokens[at + 1 :]))
    return float(torch.cat(nats).mean())


def load_library(directory: ModelDirectory, precision: str) -> Library:
    """The whole model in the library's layers, with the values that ``precision`` has."""
    library = Library(directory, Placing(precision))
    library.quantise()
    library.narrow()
    return library


def library_loss(library: Library, texts: Sequence[Sequence[int]]) -> float:
    """``loss`` by the library's own layers."""
    with torch.inference_mode():
        nats = [_nats(torch.from_numpy(library.logits(text))[:-1], text[1:]) for text in texts]
    return float(torch.cat(nats).mean())


def _nats(logits: torch.Tensor, following: Sequence[int]) -> torch.Tensor:
    """Those of the token behind each row, which is the one of ``following`` at its place."""
    wanted = torch.tensor(following[: len(logits)])
    return torch.nn.functional.cross_entropy(logits.double().cpu(), wanted, reduction="none")
