"""A block's share of a drafter's sum over tapped layers (``taps``), added while the block runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from flowspec.core.protocol.work import Part
from flowspec.errors import ModelError
from flowspec.model.base import RowArray
from flowspec.model.kernels import served
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.linear import KernelLinear, load_linear
from flowspec.model.layers.taps import Taps, beside, parted
from flowspec.model.rows.arrays import split, to_array, to_tensor
from flowspec.model.rows.paged import RowCache
from flowspec.model.rows.placement import Placement
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, quantise
from flowspec.model.weights.tensors import read_rows

#: Precisions of the matrix: the first beside quantised layers, where it has a kernel, as products
#: take a third of the second's time.
_QUANTISED, _WHOLE = "int8-block", "float32"


class TapShares:
    """Adds the terms of the tapped layers that ``block``, the layers ``layers``, has.

    ``drafter``: the folder with the matrix; not needed if none of these layers is tapped.
    """

    def __init__(
        self, block: LayerBlock, layers: range, taps: Taps, drafter: ModelDirectory | None
    ) -> None:
        self._block = block
        self._width = taps.width
        self._arrives = taps.reach(layers.start)
        self._leaves = taps.reach(layers.stop)
        self._terms: dict[int, KernelLinear] = {}  # by the layer's number in the block
        for layer in taps.within(layers, last=block.last):
            if drafter is None:
                raise ModelError(
                    f"layer {layer} is tapped, and the drafter {taps.drafter} is not here"
                )
            place = taps.layers.index(layer)
            self._terms[layer - layers.start] = _term(drafter, taps, place, block)

    @torch.inference_mode()
    def run(
        self,
        parts: Sequence[Part],
        rows: Sequence[RowArray | None],
        caches: Sequence[RowCache],
        placements: Sequence[Placement],
        wanted: Sequence[bool],
    ) -> list[tuple[torch.Tensor, RowArray]]:
        """As ``LayerBlock.run_together``, and each part's rows to send.

        The parts that are ``wanted`` have sums beside their ``rows`` if any layer before is tapped,
        and send them beside theirs, or alone from the last block. The others have none. Of a block
        that does not join several jobs' rows, one part at a time.
        """
        given = [self._given(*one) for one in zip(parts, rows, wanted, strict=True)]
        own = [values for values, _ in given]
        sums = torch.cat([above for _, above in given])
        readers = {layer: partial(_add, sums, linear) for layer, linear in self._terms.items()}
        hidden = self._block.run_together(parts, own, caches, placements, readers)
        by_part = split(sums, [len(part.ids) for part in parts])
        found = zip(hidden, by_part, wanted, strict=True)
        return [
            (left, self._leaving(left, above) if returned else to_array(left))
            for left, above, returned in found
        ]

    def _given(
        self, part: Part, rows: RowArray | None, wanted: bool
    ) -> tuple[RowArray | None, torch.Tensor]:
        """The part's rows without what lies beside them, and its sums before this block."""
        if wanted and rows is not None and self._arrives:
            own, above = parted(rows, self._width)
            carried = above[list(part.offsets)]
            return own, to_tensor(carried, torch.float32, self._block.device)
        shape = (len(part.ids), self._width)
        return rows, torch.zeros(shape, dtype=torch.float32, device=self._block.device)

    def _leaving(self, hidden: torch.Tensor, sums: torch.Tensor) -> RowArray:
        """What a part sends on that wants its ``sums``."""
        if self._block.last:
            return to_array(sums)
        left = to_array(hidden)
        return beside(left, to_array(sums)) if self._leaves else left


def _add(sums: torch.Tensor, linear: KernelLinear, entering: torch.Tensor) -> None:
    sums += linear(entering.float())


class _Columns:
    """The columns of a stored matrix that belong to one of several rows side by side."""

    def __init__(self, directory: ModelDirectory, name: str, columns: range) -> None:
        self._name = name
        self._entry = directory.tensor(name)
        self._columns = columns

    @property
    def shape(self) -> tuple[int, ...]:
        return self._entry.shape[0], len(self._columns)

    def read(self, rows: range, precision: str) -> Weight:
        first, end = self._columns.start, self._columns.stop
        values = (part[:, first:end] for part in read_rows(self._name, self._entry, rows))
        return quantise(values, (len(rows), len(self._columns)), precision)


def _term(drafter: ModelDirectory, taps: Taps, place: int, block: LayerBlock) -> KernelLinear:
    """The product of the tapped layer at ``place``; ModelError if the matrix has another shape."""
    hidden = int(block.config.hidden_size)
    found = drafter.tensor(taps.weight).shape
    wanted = (taps.width, len(taps.layers) * hidden)
    if found != wanted:
        raise ModelError(f"{drafter.path}: {taps.weight} has shape {found}; expected {wanted}")
    columns = range(place * hidden, (place + 1) * hidden)
    matrix = _Columns(drafter, taps.weight, columns)
    quantised = PRECISIONS[block.placing.precision].quantised
    smaller = quantised and served(_QUANTISED, block.device.type)
    return load_linear(matrix, _QUANTISED if smaller else _WHOLE, torch.float32, block.device)
