"""Training an EAGLE-1 head: it learns the target's feature and distribution at every position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, smooth_l1_loss

from flowspec.model.drafters.eagle import EagleHead, read_head
from flowspec.model.weights.directory import ModelDirectory
from ops.train.pair import optimizers
from ops.train.teaching import GUESSES, STEP_DECAY, Seen, Teacher, layer_config, unrolled

#: Half the width of the uniform noise on true features, as in EAGLE.
NOISE = 0.1
#: Weight of the features' smooth L1 beside the distance to the target's distribution.
FEATURE_WEIGHT = 0.1


class Eagle1Form:
    """``fc``, one decoder layer, the target's LM head (``flowspec.model.drafters.eagle``)."""

    taps = ()

    def fresh(self, teacher: Teacher, text: np.ndarray) -> EagleHead:
        """An untrained head of the target's shape: a Llama layer for any target family."""
        head = EagleHead(layer_config(teacher, "LlamaForCausalLMEagle"))
        hidden = head.config.hidden_size
        # Embeddings are far smaller than features; scale both to contribute equally at the start.
        # The sum stays small, since a peaked wrong distribution takes many steps to correct.
        with torch.no_grad():
            for half, scale in (
                (slice(hidden), teacher.embedding.std().item()),
                (slice(hidden, None), 2.0),
            ):
                head.fc.weight[:, half].normal_(0.0, 0.2 / (scale * hidden**0.5))
        return head

    def read(
        self, directory: ModelDirectory, target: ModelDirectory, teacher: Teacher, text: np.ndarray
    ) -> EagleHead:
        return read_head(directory, target)

    def optimizers(
        self, head: EagleHead, rates: tuple[float, float]
    ) -> list[tuple[torch.optim.Optimizer, float]]:
        """AdamW also trains ``fc``, since its two halves differ in scale."""
        return list(zip(optimizers(head, head.body, rates), rates, strict=True))

    def loss(self, head: EagleHead, teacher: Teacher, seen: Seen, steps: int) -> torch.Tensor:
        """Distance to the target's distributions and features over all steps, at all positions."""
        features = seen.features
        wanted = linear(features[:, 1:], teacher.lm_head).log_softmax(-1)
        noisy = features[:, :-1] + (torch.rand_like(features[:, :-1]) * 2 - 1) * NOISE
        total = torch.zeros((), device=features.device)
        rolled = unrolled(head, teacher.embedding[seen.ids[:, 1:]], noisy, steps)
        for step, predicted in enumerate(rolled):
            guessed = linear(predicted[:, step:], teacher.lm_head).log_softmax(-1)
            distance = (wanted[:, step:].exp() * (wanted[:, step:] - guessed)).sum(-1).mean()
            apart = smooth_l1_loss(predicted[:, step:], features[:, 1 + step :])
            total = total + STEP_DECAY**step * (distance + FEATURE_WEIGHT * apart)
        return total

    def guesses(
        self, head: EagleHead, teacher: Teacher, seen: Seen, steps: int
    ) -> Iterator[torch.Tensor]:
        embedded = teacher.embedding[seen.ids[:, 1:]]
        for predicted in unrolled(head, embedded, seen.features[:, :-1], steps):
            yield linear(predicted, teacher.lm_head).topk(GUESSES, dim=-1).indices

    def stored(self, head: EagleHead) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
        tensors: dict[str, torch.Tensor] = {
            name.removeprefix("body."): value for name, value in head.named_parameters()
        }
        return tensors, head.config.to_dict()
