"""Plain decoding by a pipeline's own blocks: one row a pass, no tree, no prunes, no speculation.

What every strategy must reproduce. It uses the blocks' kernels, so that it is the same model in the
same precision; whether that model is the library's own is ``library``'s question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling, choose
from flowspec.model.base import RowArray
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.tap_shares import TapShares
from flowspec.model.rows.arrays import to_array
from flowspec.model.weights.directory import ModelDirectory

#: ``[rows, vocabulary]``, float32.
Logits = npt.NDArray[np.float32]

_RUN = RunKey("plain", 1)


@dataclass(frozen=True)
class PlainText:
    """A prompt and its plain continuation.

    ``logits``: of the rows that chose each output token, ``[tokens, vocabulary]``, float32.
    ``hidden``: rows after the final norm of the prompt and all output tokens but the last, in the
    stages' own type.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    logits: Logits
    hidden: RowArray


class Rows:
    """Rows of one text through all blocks, each call one pass over the rows that follow."""

    def __init__(self, blocks: Sequence[LayerBlock], capacity: int) -> None:
        self._blocks = blocks
        self._caches = [block.new_cache(capacity) for block in blocks]
        self._held = 0

    def take(self, tokens: Sequence[int]) -> Any:
        """Hidden rows after the final norm, a tensor ``[tokens, hidden]``."""
        first = self._held
        self._held += len(tokens)
        ids = range(first, self._held)
        rows: RowArray | None = None
        hidden: Any = None
        for block, cache in zip(self._blocks, self._caches, strict=True):
            part = _part(ids, () if rows is not None else tokens)
            hidden = block.run(part, rows, cache)
            rows = to_array(hidden)
        return hidden


def _part(ids: range, tokens: Sequence[int]) -> Part:
    """The part of context rows ``ids``; without ``tokens`` its input rows are given."""
    return Part(
        run=_RUN,
        segment=0,
        ids=tuple(ids),
        parents=tuple(node - 1 for node in ids),
        positions=tuple(ids),
        tokens=tuple(tokens),
        offsets=() if tokens else tuple(range(len(ids))),
        context=len(ids),
    )


def decode(
    blocks: Sequence[LayerBlock],
    target: ModelDirectory,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
) -> PlainText:
    """Up to ``count`` tokens after ``prompt``; an eos token or a full context ends it early."""
    room = min(count, target.context - len(prompt))
    rows = Rows(blocks, len(prompt) + room)
    hidden = [rows.take([token]) for token in prompt]
    output: list[int] = []
    logits = []
    for index in range(len(prompt), len(prompt) + room):
        table = blocks[-1].logits(hidden[-1])[0].float().cpu().numpy()
        logits.append(table)
        output.append(choose(table, sampling, index))
        if output[-1] in target.eos or len(output) == room:
            break
        hidden.append(rows.take(output[-1:]))
    held = np.concatenate([to_array(row) for row in hidden])
    return PlainText(tuple(prompt), tuple(output), sampling, np.stack(logits), held)


def returned(
    shares: Sequence[TapShares], blocks: Sequence[LayerBlock], text: PlainText
) -> RowArray:
    """What the ``blocks`` return of ``text`` to a head with these ``shares``: a sum a token."""
    tokens = (*text.prompt, *text.output)[: len(text.hidden)]
    rows: RowArray | None = None
    for share, block in zip(shares, blocks, strict=True):
        part = _part(range(len(tokens)), () if rows is not None else tokens)
        cache = block.new_cache(len(tokens))
        ((_, rows),) = share.run([part], [rows], [cache], [cache.begin_pass(part)], [True])
    assert rows is not None
    return rows


def together(blocks: Sequence[LayerBlock], text: PlainText, width: int) -> tuple[RowArray, Logits]:
    """Hidden rows of ``text`` as ``PlainText.hidden``, in passes of ``width`` rows, and logits."""
    tokens = (*text.prompt, *text.output)[: len(text.hidden)]
    rows = Rows(blocks, len(tokens))
    parts = [rows.take(tokens[at : at + width]) for at in range(0, len(tokens), width)]
    logits = [blocks[-1].logits(part).float().cpu().numpy() for part in parts]
    return np.concatenate([to_array(part) for part in parts]), np.concatenate(logits)
