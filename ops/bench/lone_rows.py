"""Rows of a model in shared passes against the same rows in passes of their own.

With the project's attention, which sums in float64, and with the library's SDPA, which sums in the
rows' own type and exists here for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.cli.generate import read_prompts
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import RowArray
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.arrays import to_array
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import ModelDirectory
from flowspec.proof.plain import Rows, decode

OURS = "float64"
LIBRARY = "SDPA"


class SdpaBlock(LayerBlock):
    """A block whose attention is the library's, with a boolean mask."""

    short_path = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.body.config._attn_implementation = "sdpa"

    def _bias(self, mask: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(mask)[None, None]


BLOCKS: dict[str, type[LayerBlock]] = {OURS: LayerBlock, LIBRARY: SdpaBlock}


@dataclass(frozen=True, slots=True)
class Compared:
    """``equal`` of ``rows`` have the same bits in hidden row and logits.

    ``largest``: difference of two logits. ``flips``: rows with another best token.
    """

    rows: int
    equal: int
    largest: float
    flips: int


def load_target(kind: str, precision: str, directory: ModelDirectory) -> LayerBlock:
    """The whole model in one block with the attention ``kind``."""
    layers = range(directory.layers)
    return BLOCKS[kind](directory, layers, first=True, last=True, placing=Placing(precision))


def texts(directory: ModelDirectory, file: Path, count: int, tokens: int) -> list[tuple[int, ...]]:
    """``count`` prompts with their greedy continuations, cut or grown to ``tokens``.

    The prompts are spread over ``file``, in the chat template.
    """
    tokenizer = Tokenizer(directory)
    prompts = read_prompts(file)
    block = load_target(OURS, "float32", directory)
    found = []
    for prompt in prompts[:: max(1, len(prompts) // count)][:count]:
        given = tokenizer.encode(prompt, raw=False)[:tokens]
        room = max(1, tokens - len(given))
        text = decode([block], directory, given, room, Sampling())
        found.append((*text.prompt, *text.output)[:tokens])
    return found


def compare(block: LayerBlock, texts: Sequence[Sequence[int]], width: int) -> Compared:
    """Passes of ``width`` rows against lone ones, the rows of every text in its order."""
    equal = flips = rows = 0
    largest = 0.0
    for tokens in texts:
        alone, its_logits = _passes(block, tokens, 1)
        shared, logits = _passes(block, tokens, width)
        same = _bits(alone) == _bits(shared)
        same_logits = _bits(its_logits) == _bits(logits)
        equal += int((same.all(axis=1) & same_logits.all(axis=1)).sum())
        flips += int((its_logits.argmax(axis=1) != logits.argmax(axis=1)).sum())
        largest = max(largest, float(np.abs(its_logits - logits).max()))
        rows += len(tokens)
    return Compared(rows, equal, largest, flips)


def _passes(
    block: LayerBlock, tokens: Sequence[int], width: int
) -> tuple[RowArray, npt.NDArray[np.float32]]:
    """Hidden rows in the stages' own type, and logits."""
    rows = Rows([block], len(tokens))
    hidden = [rows.take(tokens[at : at + width]) for at in range(0, len(tokens), width)]
    logits = [block.logits(part).float().numpy() for part in hidden]
    return np.concatenate([to_array(part) for part in hidden]), np.concatenate(logits)


def _bits(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8)


def table(
    directory: ModelDirectory,
    precisions: Sequence[str],
    file: Path,
    count: int,
    tokens: int,
    width: int,
) -> Iterator[str]:
    """Markdown: a row per precision and attention."""
    given = texts(directory, file, count, tokens)
    columns = ("precision", "kernels", "attention", "rows", "equal rows", "largest difference")
    yield f"| {' | '.join(columns)} | other best |"
    yield "|---" * (len(columns) + 1) + "|"
    for precision in precisions:
        for kind in BLOCKS:
            block = load_target(kind, precision, directory)
            found = compare(block, given, width)
            cells = [precision, ", ".join(block.kernels), kind, str(found.rows), str(found.equal)]
            yield f"| {' | '.join(cells)} | {found.largest:.2g} | {found.flips} |"
