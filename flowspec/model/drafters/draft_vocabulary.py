"""Proposals of a head whose LM head has fewer tokens than its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flowspec.core.protocol.work import Draft, DraftDone
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ModelError
from flowspec.model.drafters.language_model import propose


class DraftVocabulary:
    """The target's tokens that a head can propose.

    ``offsets``: by the head's id, what has to be added to it for the target's (the published
    ``d2t``). ModelError if an id is outside the target's ``size`` tokens, or they do not ascend.
    """

    def __init__(self, offsets: torch.Tensor, size: int) -> None:
        ids = offsets.cpu() + torch.arange(len(offsets))
        if not len(ids) or ids[0] < 0 or ids[-1] >= size or bool((ids[1:] <= ids[:-1]).any()):
            raise ModelError(
                f"d2t does not name ascending tokens of a vocabulary of {size}; download the head "
                "again"
            )
        self._ids = ids
        self._names: Sequence[int] = ids.tolist()
        self._size = size

    def __len__(self) -> int:
        return len(self._names)

    def propose(self, logits: torch.Tensor, work: Draft, sampling: Sampling) -> DraftDone:
        """As ``drafter.propose``; ``logits`` is ``[answers, head's tokens]``.

        Tokens that the head lacks have no probability.
        """
        if not work.coupled:
            found = propose(logits, work, sampling)
            tokens = tuple(tuple(self._names[token] for token in row) for row in found.tokens)
            return replace(found, tokens=tokens)
        # The noise of a coupled draft is drawn by the target's ids.
        whole = logits.new_full((len(logits), self._size), -torch.inf)
        whole[:, self._ids.to(logits.device)] = logits
        return propose(whole, replace(work, width=min(work.width, len(self))), sampling)
