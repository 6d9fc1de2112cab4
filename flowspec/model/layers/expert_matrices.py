"""The matrices of a mixture's experts, in any of the layouts of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowspec.model.layers.experts import WEIGHTS
from flowspec.model.layers.joined import Stack
from flowspec.model.layers.linear import Matrix
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, quantise
from flowspec.model.weights.stored_weight import CODES, StoredWeight
from flowspec.model.weights.tensor_files import TensorEntry
from flowspec.model.weights.tensors import check_shape, read_bytes, read_rows, read_tensor

#: Names of one expert's matrices in checkpoints that have a tensor for each: the parts of
#: ``gate_up_proj`` one above the other, then ``down_proj``.
_SEPARATE = (
    (("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)),
    (("w1.weight", "w3.weight"), ("w2.weight",)),
)
_PARTS = [part for layout in _SEPARATE for parts in layout for part in parts]
#: The library's name of a mixture in a layer, and the one that some checkpoints have.
_RENAMED = (".mlp.", ".block_sparse_moe.")
_OWN = re.compile(rf"\.experts\.\d+\.({'|'.join(map(re.escape, _PARTS))})$")
_OF_ALL = re.compile(r"\.experts\.\D")


def mixture_names(directory: ModelDirectory) -> Callable[[str], str]:
    """From the library's names to those in the checkpoint ``directory``."""
    renamed = any(_RENAMED[1] in name for name in directory.weight_files)
    return lambda name: name.replace(*_RENAMED) if renamed else name


def own_matrix(name: str) -> bool:
    """Whether the tensor ``name`` is a matrix of one expert, and no other's."""
    return _OWN.search(name) is not None


def of_all_experts(name: str) -> bool:
    """Whether the tensor ``name`` is of all experts of a mixture."""
    return _OF_ALL.search(name) is not None


def read_as(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what the matrix ``name``, of ``shape``, of one expert is read as a part of."""
    beside = next(parts for layout in _SEPARATE for parts in layout if name.endswith(parts))
    return (len(beside) * shape[0], *shape[1:])


class ExpertMatrices:
    """A matrix of every expert of a mixture.

    ``prefix``: the stored name of the module of experts. ``at``: which of ``WEIGHTS`` is read, a
    matrix of ``shape`` for each expert. ``transposed``: a tensor of all experts holds it with rows
    and columns exchanged. ``interleaved``: the rows of its parts follow each other in turn.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        prefix: str,
        at: int,
        shape: tuple[int, int],
        *,
        transposed: bool,
        interleaved: bool = False,
    ) -> None:
        self.shape = shape
        self._interleaved = interleaved
        self._directory = directory
        self._prefix = prefix
        self._at = at
        self._name = f"{prefix}.{WEIGHTS[at]}"
        self._transposed = transposed

    def of(self, expert: int) -> Matrix:
        """The matrix of ``expert``; ModelError if it is missing or has another shape."""
        files = self._directory.weight_files
        if self._name in files or f"{self._name}_blocks" in files:
            return _Member(self, expert)
        prefix = f"{self._prefix}.{expert}."
        layouts = [layout[self._at] for layout in _SEPARATE]
        stored = (
            parts
            for parts in layouts
            if any(prefix + parts[0] + suffix in files for suffix in ("", CODES))
        )
        parts = next(stored, layouts[0])
        matrices = [StoredWeight(self._directory, prefix + part) for part in parts]
        height = self.shape[0] // len(parts)
        for part, matrix in zip(parts, matrices, strict=True):
            check_shape(prefix + part, matrix.shape, (height, self.shape[1]))
        return _Interleaved(matrices) if self._interleaved else Stack(matrices)

    def bias(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The expert's bias; of checkpoints, in one tensor with all others.

        ModelError if it is missing or has another shape.
        """
        owner = f"{self._prefix}.{expert}."
        parts = [f"{owner}{part.removesuffix('weight')}bias" for part in _SEPARATE[0][self._at]]
        if parts[0] in self._directory.weight_files:
            height = self.shape[0] // len(parts)
            entries = {part: self._directory.tensor(part) for part in parts}
            for part, stored in entries.items():
                check_shape(part, stored.shape, (height,))
            values = [read_tensor(part, stored, dtype) for part, stored in entries.items()]
            return torch.stack(values, dim=-1).flatten()
        name = f"{self._name}_bias"
        entry = _member(self._directory.tensor(name), expert)
        check_shape(name, entry.shape, self.shape[:1])
        return read_tensor(name, entry, dtype)

    def rows(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        """``rows`` of the matrix of ``expert``, which is in one tensor with others', in slices."""
        if self._name not in self._directory.weight_files:
            return self._of_blocks(expert, rows)
        entry = _member(self._directory.tensor(self._name), expert)
        check_shape(self._name, entry.shape, self.shape[::-1] if self._transposed else self.shape)
        if not self._transposed:
            return read_rows(self._name, entry, rows)
        whole = torch.cat(list(read_rows(self._name, entry)))
        return iter((whole.t()[rows.start : rows.stop],))

    def _of_blocks(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        """From mxfp4, as bfloat16, which holds its values exactly."""
        parts = []
        for part in ("blocks", "scales"):
            name = f"{self._name}_{part}"
            parts.append(read_bytes(name, _member(self._directory.tensor(name), expert))[None])
        values = convert_moe_packed_tensors(*parts)[0].t()
        check_shape(f"{self._name}_blocks", tuple(values.shape), self.shape)
        return iter((values[rows.start : rows.stop],))


class _Interleaved:
    """Matrices of one shape as one: the first row of each, then the second of each."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, inputs = self._matrices[0].shape
        return (len(self._matrices) * outputs, inputs)

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the whole; errors as those of the matrices."""
        count = len(self._matrices)
        own = range(rows.start // count, -(-rows.stop // count))
        parts = [matrix.read(own, precision).tensors for matrix in self._matrices]
        begin = rows.start - own.start * count
        columns = [
            torch.stack(column, dim=1).flatten(0, 1)[begin : begin + len(rows)].contiguous()
            for column in zip(*parts, strict=True)
        ]
        return Weight(PRECISIONS[precision], (len(rows), self.shape[1]), *columns)


@dataclass(frozen=True, slots=True)
class _Member:
    """The matrix of ``expert`` in a tensor of all."""

    all: ExpertMatrices
    expert: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.all.shape

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the matrix in ``precision``; errors as ``quantise``'s and ``read_rows``'s."""
        shape = (len(rows), self.shape[1])
        return quantise(self.all.rows(self.expert, rows), shape, precision)


def _member(entry: TensorEntry, at: int) -> TensorEntry:
    """Element ``at`` of a tensor along its first dimension."""
    if not entry.shape or at >= entry.shape[0]:
        return replace(entry, shape=())
    size = (entry.end - entry.start) // entry.shape[0]
    start = entry.start + at * size
    return replace(entry, start=start, end=start + size, shape=entry.shape[1:])
