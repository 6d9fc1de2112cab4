"""The library's own whole model beside ours: the same weights, its masks, attention and products.

Its weights are the same values that ours are quantised to, so that what differs is rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from flowspec.model.directory import ModelDirectory
from flowspec.model.experts import WEIGHTS, is_experts
from flowspec.model.placing import Placing
from flowspec.model.precision import PRECISIONS
from flowspec.model.quantise import dequantise, quantise

#: Largest mean divergence that rounding explains, nats a token, by the precision of the layers:
#: ten times what the packaged target shows. In four and eight bits a small error of positions may
#: hide below it; a copy in float32 (``model.trial``) shows that one.
MOST_DIVERGENCE = {
    "float32": 1e-6,
    "float16": 1e-5,
    "bfloat16": 2e-3,
    "int8": 2e-2,
    "nf4": 5e-3,
    "fp4": 5e-3,
    "nf4-double": 5e-3,
    "fp4-double": 5e-3,
    "int4": 5e-3,
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far our distributions are from the library's.

    ``divergence``: mean Kullback-Leibler divergence, nats a token. ``same``: share of positions
    with the same best token. ``positions``: how many were compared.
    """

    divergence: float
    same: float
    positions: int


class Library:
    """The whole model of ``directory`` on the CPU, with the values of ``placing``'s precisions."""

    def __init__(self, directory: ModelDirectory, placing: Placing) -> None:
        disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=placing.rows, local_files_only=True, trust_remote_code=False
        ).eval()
        self._round(placing)

    @torch.inference_mode()
    def _round(self, placing: Placing) -> None:
        head = self._model.get_output_embeddings()
        for module in self._model.modules():
            if isinstance(module, torch.nn.Linear):
                precision = placing.head if module is head else placing.precision
                rounded = _rounded(module.weight.data, precision)
                if module is head:
                    # A tied head must not change the embedding, which is not quantised.
                    module.weight = torch.nn.Parameter(rounded, requires_grad=False)
                else:
                    module.weight.data.copy_(rounded)
            elif is_experts(module):
                for name in WEIGHTS:
                    for expert in getattr(module, name).data:
                        matrix = expert.t() if module.is_transposed else expert
                        matrix.copy_(_rounded(matrix, placing.precision))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """``[tokens, vocabulary]``, float32, of one causal pass."""
        found: npt.NDArray[np.float32] = (
            self._model(input_ids=torch.tensor([list(tokens)])).logits[0].float().numpy()
        )
        return found


def _rounded(matrix: torch.Tensor, precision: str) -> torch.Tensor:
    """The values of ``matrix`` as a stage has them in ``precision``."""
    shape = (matrix.shape[0], matrix.shape[1])
    held = PRECISIONS[precision].for_matrix(shape).name
    return dequantise(quantise([matrix], shape, held), matrix.dtype)


def agreement(
    ours: Sequence[npt.NDArray[np.float32]], theirs: Sequence[npt.NDArray[np.float32]]
) -> Agreement:
    """Compare logits ``[tokens, vocabulary]`` of several texts."""
    divergences = []
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        p = _log_softmax(other)
        q = _log_softmax(mine)
        divergences += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
        same += int((mine.argmax(axis=-1) == other.argmax(axis=-1)).sum())
    return Agreement(
        math.fsum(divergences) / len(divergences), same / len(divergences), len(divergences)
    )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    found: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return found


def bytes_needed(directory: ModelDirectory, placing: Placing) -> int:
    """Memory of the library's whole model, bytes."""
    size = torch.empty((), dtype=placing.rows).element_size()
    return sum(math.prod(directory.tensor(name).shape) for name in directory.weight_files) * size
