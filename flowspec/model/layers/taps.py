"""Hidden rows inside a target that a drafter reads, summed where they are computed. Needs no torch.

A head's matrix ``fc`` maps several hidden rows of a token, side by side, to one. That product is
the sum of one product per tapped layer, so a stage adds those of the layers that it holds, and
one row of ``width`` values a token travels on instead of all of them. The sum is float32 whatever
the stages compute in: terms of several sizes are added, and the text does not depend on them. It
lies behind a row's own values, bit for bit, in as many elements of the rows' type as it needs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.model.base import RowArray

#: The type of sums.
SUM = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Taps:
    """What a drafter reads inside its target: one sum of ``width`` values a token.

    ``layers``: the layers whose input rows are read, in the order of the matrix's columns, all
    different; the number after the last layer's stands for the last layer's output, before the
    final norm. ``weight``: name of the matrix, ``[width, layers * hidden]``, in the folder of
    ``drafter``. ``fingerprint``: the drafter's, if a pipeline's workers are to compare it.
    """

    drafter: str
    weight: str
    layers: tuple[int, ...]
    width: int
    fingerprint: str = ""

    def within(self, layers: range, *, last: bool) -> tuple[int, ...]:
        """The tapped layers whose rows the block ``layers`` has; ``last``: it ends the model."""
        return tuple(
            layer for layer in self.layers if layer in layers or (last and layer == layers.stop)
        )

    def reach(self, layer: int) -> bool:
        """Whether rows into ``layer`` carry the sum: a layer before it is tapped."""
        return min(self.layers) < layer

    def text(self) -> str:
        """As JSON, for a pipeline's record."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Taps:
        """The taps that ``text`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "layers": tuple(fields["layers"])})


def elements(width: int, kind: npt.DTypeLike) -> int:
    """Elements of type ``kind`` that hold a sum of ``width`` values."""
    return width * SUM.itemsize // np.dtype(kind).itemsize


def beside(rows: RowArray, sums: RowArray) -> RowArray:
    """``rows``, ``[rows, hidden]`` of any row type, with ``sums`` behind each."""
    return np.concatenate((rows, np.ascontiguousarray(sums, SUM).view(rows.dtype)), axis=1)


def parted(rows: RowArray, width: int) -> tuple[RowArray, RowArray]:
    """The rows and the sums of ``width`` values that ``beside`` put together."""
    hidden = rows.shape[1] - elements(width, rows.dtype)
    return rows[:, :hidden], np.ascontiguousarray(rows[:, hidden:]).view(SUM)
