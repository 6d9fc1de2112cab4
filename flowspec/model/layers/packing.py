"""Bringing a linear layer's weights into a kernel's layout within little memory.

While a kernel packs a matrix, it exists twice or three times. A large one is therefore packed in
pieces of its rows, and their products are joined. A row of the product has the same bits as in one
piece; tests/model/test_packing.py compares them for every kernel.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

import torch

from flowspec.model.kernels.base import Kernel, Multiply, Packed
from flowspec.model.weights.quantise import Weight

#: Most weights of a piece.
PIECE = 1 << 25
#: Fewest weights of a matrix whose slices are worth giving back: the next one uses those of less.
_WORTH_A_TRIM = 1 << 20
#: Rows of the matrix that some kernel packs together; a piece but the last has a multiple of it.
_TOGETHER = 32


def pack(
    read: Callable[[range], Weight],
    shape: tuple[int, int],
    kernel: Kernel,
    rows: torch.dtype,
    device: torch.device,
    piece: int = PIECE,
) -> Packed:
    """The matrix of ``shape`` in the layout of ``kernel``, for rows of type ``rows``.

    ``read`` returns a range of its rows; ``piece``: as ``PIECE``. Other devices than the CPU get
    the matrix in one piece, for they have one launch a product.
    """
    outputs, inputs = shape
    step = max(1, piece // (inputs * _TOGETHER)) * _TOGETHER if device.type == "cpu" else outputs
    pieces = []
    for at in range(0, outputs, step):
        weight = read(range(at, min(at + step, outputs)))
        pieces.append(kernel.pack(weight, rows, device))
        del weight
        if outputs * inputs >= _WORTH_A_TRIM:
            give_back()
    if len(pieces) == 1:
        return pieces[0]
    multiply = _joined([part.multiply for part in pieces])
    matrices = tuple(matrix for part in pieces for matrix in part.matrices)
    size = sum(part.nbytes for part in pieces)
    return Packed(multiply, size, pads=pieces[0].pads, matrices=matrices)


def give_back() -> None:
    """Return the allocator's free memory to the system, where the C library is glibc.

    It would keep what the slices of every tensor leave behind, a tenth to a third of a quantised
    stage. A low threshold for memory maps would not keep it either, but doubles the loading time
    and slows down every pass.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def _joined(pieces: list[Multiply]) -> Multiply:
    def multiply(given: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece(given) for piece in pieces], dim=-1)

    return multiply
