"""What a kernel is: a way to multiply rows by weights of some precisions, on some devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flowspec.model.weights.quantise import Weight

#: ``[rows, inputs]`` to ``[rows, outputs]``, both in the rows' type, without a bias.
Multiply = Callable[[torch.Tensor], torch.Tensor]
#: Rows of a product on a GPU: so many take one to three times as long as one.
GPU_SLICE = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights as a kernel keeps them: ``multiply`` applies them, ``nbytes`` is what they take.

    ``pads``: a lone row is repeated (``padded``). ``matrices``: where they lie, for a layer in C
    (``integer.PackedMatrix``), one's outputs behind another's; valid while ``multiply`` lives.
    """

    multiply: Multiply
    nbytes: int
    pads: bool = False
    matrices: tuple[Any, ...] = ()


class Kernel(Protocol):
    """A matrix multiplication for linear layers.

    ``precisions``: those of weights that it multiplies. ``device``: ``cpu`` or ``cuda``.
    """

    @property
    def name(self) -> str: ...

    @property
    def precisions(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> str: ...

    def missing(self) -> str:
        """What this machine lacks for the kernel, and how to get it; empty: nothing."""
        ...

    def takes(self, outputs: int, inputs: int) -> bool:
        """Whether the kernel can multiply by a matrix of this shape."""
        ...

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        """Bring ``weight`` into the kernel's layout, for rows of type ``rows``."""
        ...


def in_slices(multiply: Multiply, rows: torch.Tensor, size: int = GPU_SLICE) -> torch.Tensor:
    """``multiply`` over ``size`` rows at a time, the last ones with zeros below them.

    For kernels whose path, and so the last bits of a row, depends on the number of rows.
    """
    count = rows.shape[0]
    lacking = -count % size
    whole = torch.nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking else rows
    if len(whole) == size:
        return multiply(whole)[:count]
    return torch.cat([multiply(part) for part in torch.split(whole, size)])[:count]


def padded(multiply: Multiply) -> Multiply:
    """``multiply`` with a lone row repeated.

    For kernels that compute one row by another path, and so to other last bits, than several.
    """

    def at_least_two(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] > 1:
            return multiply(rows)
        return multiply(rows.expand(2, -1).contiguous())[:1]

    return at_least_two
