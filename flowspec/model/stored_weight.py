"""One linear layer's weights as they lie in a model's files, read a range of rows at a time.

A shard in a quantised precision has ``NAME.codes`` and ``NAME.scales`` (``quantise``) in the place
of a matrix ``NAME``; their rows are those of the matrix.
"""

from __future__ import annotations

from flowspec.errors import ModelError
from flowspec.model.directory import ModelDirectory
from flowspec.model.precision import PRECISIONS
from flowspec.model.quantise import Weight, quantise
from flowspec.model.weights import read_codes, read_rows

CODES = ".codes"
SCALES = ".scales"


class StoredWeight:
    """The matrix ``name`` of ``directory``; ModelError if it is not there."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._kind = None
        if directory.shard is not None and name + CODES in directory.weight_files:
            self._kind = PRECISIONS[directory.shard.dtype]
        self._entry = directory.tensor(name + CODES if self._kind else name)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(outputs, inputs)`` of a well-formed matrix."""
        if self._kind is None:
            return self._entry.shape
        outputs, width = self._entry.shape
        return outputs, width * 8 // self._kind.bits

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the matrix in ``precision``; errors as ``quantise``'s and ``read_rows``'s.

        ModelError if it is stored in another quantised precision.
        """
        shape = (len(rows), self.shape[1])
        if self._kind is None:
            return quantise(read_rows(self._name, self._entry, rows), shape, precision)
        if self._kind.name != precision:
            raise ModelError(
                f"{self._directory.path} holds {self._name} in {self._kind.name}; "
                f"it cannot be loaded in {precision}"
            )
        scales = self._name + SCALES
        return Weight(
            self._kind,
            shape,
            read_codes(self._name + CODES, self._entry, rows),
            read_codes(scales, self._directory.tensor(scales), rows),
        )
