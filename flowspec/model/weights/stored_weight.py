"""One linear layer's weights as they lie in a model's files, read a range of rows at a time.

A shard in a quantised precision has ``NAME.codes``, ``NAME.scales`` and, double-quantised,
``NAME.row_scales`` (``quantise``) in the place of a matrix ``NAME``; their rows are its rows.
"""

from __future__ import annotations

import torch

from flowspec.errors import ModelError
from flowspec.model.weights import gguf_rows
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import KEPT, PRECISIONS
from flowspec.model.weights.quantise import Weight, code_layout, quantise
from flowspec.model.weights.tensors import read_blocks, read_codes, read_rows

CODES = ".codes"
SCALES = ".scales"
ROW_SCALES = ".row_scales"
#: What follows the name of a quantised matrix in the names of its tensors, in their order.
SUFFIXES = (CODES, SCALES, ROW_SCALES)
_EIGHT_BITS = "I8"


class StoredWeight:
    """The matrix ``name`` of ``directory``; ModelError if it is not there."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._kind = None
        if directory.shard is not None and name + CODES in directory.weight_files:
            self._kind = PRECISIONS[directory.shard.dtype]
        self._entry = directory.tensor(name + CODES if self._kind else name)
        if self._entry.dtype == _EIGHT_BITS and directory.tensor(name + SCALES).shape[1:] == (1,):
            self._kind = PRECISIONS["int8"]  # of whatever precision the shard is otherwise

    @property
    def shape(self) -> tuple[int, ...]:
        """``(outputs, inputs)`` of a well-formed matrix."""
        if self._kind is None:
            return self._entry.shape
        outputs, width = self._entry.shape
        return outputs, width * 8 // self._kind.bits

    def layout(self, precision: str) -> list[tuple[torch.dtype, tuple[int, int]]]:
        """Types and shapes of the tensors of the matrix in ``precision``, as ``read`` gives it."""
        outputs, inputs = self.shape
        types, shapes = code_layout((outputs, inputs), precision)
        if self._keeps(precision):
            types[1] = torch.float16
        return [*zip(types, shapes, strict=True)]

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the matrix in ``precision``; errors as ``quantise``'s and ``read_rows``'s.

        ModelError if it is stored in another quantised precision.
        """
        shape = (len(rows), self.shape[1])
        self._check_codes(precision)
        if self._keeps(precision):
            found = read_blocks(self._name, self._entry, rows)
            return Weight(PRECISIONS[precision], shape, *found)
        if self._kind is None:
            return quantise(read_rows(self._name, self._entry, rows), shape, precision)
        if self._kind.name != precision:
            raise ModelError(
                f"{self._directory.path} holds {self._name} in {self._kind.name}; "
                f"it cannot be loaded in {precision}"
            )
        stored = [self._name + suffix for suffix in SUFFIXES[: 3 if self._kind.double else 2]]
        codes = [read_codes(name, self._directory.tensor(name), rows) for name in stored]
        return Weight(self._kind, shape, *codes)

    def _check_codes(self, precision: str) -> None:
        """ModelError for a shard without the codes of its GGUF file: other stages may have them."""
        directory = self._directory
        if directory.shard is None or not precision == directory.config.get(KEPT) == "int4":
            return
        scales = directory.weight_files.get(self._name + SCALES)
        if scales is None or directory.tensor(self._name + SCALES).dtype != "F16":
            raise ModelError(
                f"{directory.path} has {self._name} without the codes of its GGUF file: cut it "
                "again with --dtype int4"
            )

    def _keeps(self, precision: str) -> bool:
        """Whether it is read in the codes of a GGUF file, all of whose layers have such."""
        kept = precision == self._directory.config.get(KEPT) == "int4"
        return kept and gguf_rows.has_codes(self._entry)
