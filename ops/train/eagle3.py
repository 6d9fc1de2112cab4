"""Training an EAGLE-3 head: it learns the target's distribution alone, from rows inside the target.

Source: arXiv 2503.01840 and the authors' training code: no loss on features, steps weighted by
0.8 each, and positions left out whose most likely token the head does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div, linear

from flowspec.model.drafters.eagle3 import Eagle3Head, read_eagle3
from flowspec.model.drafters.eagle3_layout import OFFSETS, TAPPED, read_layout
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.tensors import read_integers
from ops.train.pair import adam, optimizers
from ops.train.teaching import GUESSES, STEP_DECAY, Seen, Teacher, layer_config, unrolled

#: Size of the rows into the LM head at the start, relative to the target's: a peaked wrong
#: distribution takes many steps to correct.
QUIET = 0.2
#: Score at the start of a token's own row against itself in an attention head that reads it.
SELF_SCORE = 8.0
#: Size of features at the start: what the layer adds to them has to be seen beside them.
FEATURE = 0.1
#: Tokens of the text that the sizes of tapped rows are measured on.
MEASURED = 512
LEAST = 1e-3


class Eagle3Form:
    """``fc`` over ``taps``, one decoder layer, an LM head over ``vocabulary`` tokens; 0: all.

    The tokens are the most frequent ones of the text (``flowspec.model.drafters.eagle3``). In
    training ``fc`` reads values of size 1; what makes them so is multiplied into the stored matrix.
    """

    def __init__(self, taps: Sequence[int], vocabulary: int = 0) -> None:
        self._taps = tuple(taps)
        self._count = vocabulary
        self._ids = torch.zeros(0, dtype=torch.int64)  # the target's id of each of the head's
        self._factors = torch.zeros(0)  # of tapped rows side by side

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps

    def fresh(self, teacher: Teacher, text: np.ndarray) -> Eagle3Head:
        """A head to whose feature all tapped rows contribute equally, with the target's LM head."""
        self._ids = self._often(teacher, text)
        config = layer_config(teacher, "LlamaForCausalLMEagle3")
        joined = len(self._taps) * config.hidden_size
        head = Eagle3Head(config, len(self._ids), joined=joined)
        self._factors = self._factors_of(teacher, text)
        with torch.no_grad():
            _look_at_oneself(head)
            head.fc.weight.normal_(0.0, FEATURE * joined**-0.5)
            head.lm_head.weight.copy_(teacher.lm_head[self._ids])
            head.norm.weight.copy_(QUIET * teacher.model.model.norm.weight)
        return head

    def read(
        self, directory: ModelDirectory, target: ModelDirectory, teacher: Teacher, text: np.ndarray
    ) -> Eagle3Head:
        """A saved head; ``vocabulary`` tokens are chosen anew, new ones get the target's rows."""
        layout = read_layout(directory, target)
        self._taps = layout.taps.layers
        had = torch.arange(layout.vocabulary)
        if layout.mapped:
            had = had + read_integers(OFFSETS, directory.tensor(OFFSETS))
        head = read_eagle3(directory, target)
        self._ids = self._often(teacher, text) if self._count else had.to(teacher.device)
        rows = teacher.lm_head.cpu().clone()
        rows[had] = head.lm_head.weight
        head.lm_head = torch.nn.Linear(rows.shape[1], len(self._ids), bias=False)
        head.lm_head.weight.data.copy_(rows[self._ids.cpu()])
        self._factors = self._factors_of(teacher, text)
        with torch.no_grad():
            head.fc.weight.div_(self._factors.cpu())
        return head

    def _often(self, teacher: Teacher, text: np.ndarray) -> torch.Tensor:
        """The most frequent tokens of ``text``, ascending."""
        size = len(teacher.lm_head)
        counts = np.bincount(text, minlength=size)
        often = np.argsort(-counts, kind="stable")[: self._count or size]
        return torch.from_numpy(np.sort(often)).to(teacher.device)

    def optimizers(
        self, head: Eagle3Head, rates: tuple[float, float]
    ) -> list[tuple[torch.optim.Optimizer, float]]:
        """``fc`` and the LM head at lower rates: large steps would undo what they start as."""
        layer, rest = optimizers(head.midlayer, head.midlayer, rates)
        return [
            (layer, rates[0]),
            (rest, rates[1]),
            (adam(head.norm.parameters()), rates[1]),
            (adam(head.fc.parameters()), rates[1] / 10),
            (adam(head.lm_head.parameters()), rates[1] / 25),
        ]

    def loss(self, head: Eagle3Head, teacher: Teacher, seen: Seen, steps: int) -> torch.Tensor:
        """Distance to the target's distribution over the head's tokens, over all steps."""
        known = self._ids.to(seen.ids.device)
        learned = seen.counted[:, 1:] & torch.isin(seen.best[:, 1:], known)
        column = learned.nonzero()[:, 1]
        features = seen.features[:, 1:][learned]
        wanted = linear(features, teacher.lm_head[known]).log_softmax(-1)
        total = torch.zeros((), device=seen.ids.device)
        embedded = teacher.embedding[seen.ids[:, 1:]]
        rolled = unrolled(head, embedded, self._read(head, seen.tapped[:, :-1]), steps)
        for step, predicted in enumerate(rolled):
            deep = column >= step
            guessed = head.logits(predicted[learned][deep]).log_softmax(-1)
            distance = kl_div(guessed, wanted[deep], reduction="sum", log_target=True)
            positions = seen.counted[:, 1 + step :].sum().clamp(min=1)
            total = total + STEP_DECAY**step * distance / positions
        return total

    def guesses(
        self, head: Eagle3Head, teacher: Teacher, seen: Seen, steps: int
    ) -> Iterator[torch.Tensor]:
        known = self._ids.to(seen.ids.device)
        embedded = teacher.embedding[seen.ids[:, 1:]]
        read = self._read(head, seen.tapped[:, :-1])
        for predicted in unrolled(head, embedded, read, steps):
            yield known[head.logits(predicted).topk(GUESSES, dim=-1).indices]

    def _read(self, head: Eagle3Head, tapped: torch.Tensor) -> torch.Tensor:
        """Features from the tapped rows side by side."""
        read: torch.Tensor = head.fc(tapped * self._factors.to(tapped.device))
        return read

    def _factors_of(self, teacher: Teacher, text: np.ndarray) -> torch.Tensor:
        """By value of tapped rows, what makes it of size 1 on the beginning of ``text``.

        Medians: some targets' first row is a hundred times as large as the others.
        """
        sample = torch.from_numpy(text[:MEASURED].astype(np.int64)).to(teacher.device)
        _, tapped = teacher.rows(sample[None], self._taps)
        return 1 / tapped[0].abs().median(dim=0).values.clamp(min=LEAST)

    def stored(self, head: Eagle3Head) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
        config = head.config.to_dict()
        size = int(config["vocab_size"])
        count = len(self._ids)
        tensors: dict[str, torch.Tensor] = dict(head.named_parameters())
        tensors["fc.weight"] = head.fc.weight * self._factors.to(head.fc.weight.device)
        if count < size:
            ids = self._ids.cpu()
            tensors[OFFSETS] = ids - torch.arange(count)
            tensors["t2d"] = torch.isin(torch.arange(size), ids)
        return tensors, {**config, "draft_vocab_size": count, TAPPED: list(self._taps)}


def _look_at_oneself(head: Eagle3Head) -> None:
    """Let one attention head per key find its own row.

    The residual has the feature alone: without this a row's token reaches it only as one of all.
    """
    config = head.config
    attention = head.midlayer.self_attn
    size = attention.head_dim
    spread = (SELF_SCORE / (config.hidden_size * size**0.5)) ** 0.5
    keys = attention.k_proj.weight.view(-1, size, 2 * config.hidden_size)
    keys[..., : config.hidden_size].normal_(0.0, spread)
    queries = attention.q_proj.weight.view(len(keys), -1, size, 2 * config.hidden_size)
    queries[:, 0] = keys
