"""One linear layer's weights as they lie in a model's files, read a range of rows at a time."""

from __future__ import annotations

from flowspec.model.directory import ModelDirectory
from flowspec.model.quantise import Weight, quantise
from flowspec.model.weights import read_rows


class StoredWeight:
    """The matrix ``name`` of ``directory``; ModelError if it is not there."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        self._name = name
        self._entry = directory.tensor(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(outputs, inputs)`` of a well-formed matrix."""
        return self._entry.shape

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the matrix in ``precision``; errors as ``quantise``'s and ``read_rows``'s."""
        shape = (len(rows), self._entry.shape[1])
        return quantise(read_rows(self._name, self._entry, rows), shape, precision)
