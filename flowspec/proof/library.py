"""The library's own whole model beside ours: the same weights, its masks, attention and products.

Its weights are the same values that ours are quantised to, so that what differs is rounding alone.
How much rounding may do is not a figure for all models: the library's own model shows it, computed
in the rows' type and in a wider one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.model.layers.architecture import library_model
from flowspec.model.layers.expert_matrices import ExpertMatrices, mixture_names
from flowspec.model.layers.experts import WEIGHTS, is_experts
from flowspec.model.layers.linear import Matrix
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import dequantise, quantise
from flowspec.model.weights.stored_weight import StoredWeight

#: A type in which the roundings of rows are nothing.
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
}
#: How many times as far as the library's own rounding ours may be from the same values. A
#: divergence grows with the square of an error: errors may be three times as large.
MOST_TIMES = 9.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far distributions are from others.

    ``divergence``: mean Kullback-Leibler divergence, nats a token; ``worst``: that of one position.
    ``same``: share of positions with the same best token. ``positions``: how many were compared.
    """

    divergence: float
    worst: float
    same: float
    positions: int


@dataclass(frozen=True, slots=True)
class AgainstLibrary:
    """Distributions beside those of the library in a wider type, with the same quantised values.

    ``ours``: those of the stages. ``rounding``: divergence of the library's own in the rows' type;
    ``worst_rounding``: at one position. ``cost``: of the quantised values themselves from the
    model's own weights.
    """

    ours: Agreement
    rounding: float
    worst_rounding: float
    cost: Agreement

    @property
    def same_model(self) -> bool:
        """Whether ours differ by no more than rounding explains."""
        return self.ours.divergence <= MOST_TIMES * self.rounding


class Library:
    """The whole model of ``directory`` on the CPU, in a type wider than that of its rows.

    It has the model's own weights until ``quantise``, and is in the rows' type from ``narrow`` on.
    """

    def __init__(self, directory: ModelDirectory, placing: Placing) -> None:
        self._placing = placing
        self._directory = directory
        self._model: Any = library_model(directory, _WIDER[placing.rows])

    @torch.inference_mode()
    def quantise(self) -> None:
        """Give linear layers and experts the values that stages have in the placing."""
        placing = self._placing
        head = self._model.get_output_embeddings()
        stored = mixture_names(self._directory)
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear):
                precision = placing.head if module is head else placing.precision
                rounded = self._as_stages_have(f"{name}.weight", module.weight.data, precision)
                if module is head:
                    # A tied head must not change the embedding, which is not quantised.
                    module.weight = torch.nn.Parameter(rounded, requires_grad=False)
                else:
                    module.weight.data.copy_(rounded)
            elif is_experts(module):
                for at, kind in enumerate(WEIGHTS):
                    for expert, own in enumerate(getattr(module, kind).data):
                        matrix = own.t() if module.is_transposed else own
                        matrix.copy_(self._expert(stored(name), module, at, expert, matrix))

    def _as_stages_have(self, name: str, matrix: torch.Tensor, precision: str) -> torch.Tensor:
        """The values of ``matrix``, which is ``name`` if there is one, in ``precision``."""
        if not self._directory.of_gguf or name not in self._directory.weight_files:
            return _rounded(matrix, precision)
        return _read(StoredWeight(self._directory, name), matrix, precision)

    def _expert(
        self, name: str, module: Any, at: int, expert: int, matrix: torch.Tensor
    ) -> torch.Tensor:
        """The values of ``matrix``, of an expert in ``module``, as stages have them."""
        precision = self._placing.precision
        if not self._directory.of_gguf:
            return _rounded(matrix, precision)
        shape = (matrix.shape[0], matrix.shape[1])
        experts = ExpertMatrices(
            self._directory,
            name,
            at,
            shape,
            transposed=False,
            interleaved=not module.is_concatenated,
        )
        return _read(experts.of(expert), matrix, precision)

    @torch.inference_mode()
    def narrow(self) -> None:
        """Bring the model into the rows' type."""
        self._model.to(self._placing.rows)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """``[tokens, vocabulary]``, float32, of one causal pass."""
        found: npt.NDArray[np.float32] = (
            self._model(input_ids=torch.tensor([list(tokens)])).logits[0].float().numpy()
        )
        return found


def _read(stored: Matrix, matrix: torch.Tensor, precision: str) -> torch.Tensor:
    """The values of ``stored`` in ``precision``, in the type of ``matrix``."""
    held = PRECISIONS[precision].for_matrix(stored.shape).name
    return dequantise(stored.read(range(stored.shape[0]), held), matrix.dtype)


def _rounded(matrix: torch.Tensor, precision: str) -> torch.Tensor:
    """The values of ``matrix`` as a stage has them in ``precision``."""
    shape = (matrix.shape[0], matrix.shape[1])
    held = PRECISIONS[precision].for_matrix(shape).name
    return dequantise(quantise([matrix], shape, held), matrix.dtype)


def compare(
    directory: ModelDirectory,
    placing: Placing,
    texts: Sequence[Sequence[int]],
    ours: Sequence[npt.NDArray[np.float32]],
) -> AgainstLibrary:
    """Compare our logits of ``texts``, each ``[tokens, vocabulary]``, with the library's."""
    whole = Library(directory, placing)
    own = [whole.logits(text) for text in texts]
    whole.quantise()
    exact = [whole.logits(text) for text in texts]
    cost = agreement(exact, own)
    del own
    whole.narrow()
    rounded = agreement((whole.logits(text) for text in texts), exact)
    return AgainstLibrary(agreement(ours, exact), rounded.divergence, rounded.worst, cost)


def agreement(
    found: Iterable[npt.NDArray[np.float32]], wanted: Iterable[npt.NDArray[np.float32]]
) -> Agreement:
    """How far ``found`` are from ``wanted``, logits ``[tokens, vocabulary]`` of several texts."""
    divergences: list[float] = []
    same = 0
    for one, other in zip(found, wanted, strict=True):
        p = _log_softmax(other)
        q = _log_softmax(one)
        divergences += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
        same += int((one.argmax(axis=-1) == other.argmax(axis=-1)).sum())
    count = len(divergences)
    return Agreement(math.fsum(divergences) / count, max(divergences), same / count, count)


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    found: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return found


def bytes_needed(directory: ModelDirectory, placing: Placing, lengths: Sequence[int]) -> int:
    """Memory of ``compare`` on texts of ``lengths`` tokens, bytes."""
    shapes = [directory.tensor(name).shape for name in directory.weight_files]
    # A tied head is quantised beside its embedding.
    weights = sum(map(math.prod, shapes)) + max(map(math.prod, shapes))
    # Two passes are kept in float32, and one is compared in float64.
    logits = 2 * 4 * sum(lengths) + 6 * 8 * max(lengths)
    return weights * _WIDER[placing.rows].itemsize + logits * directory.vocabulary
