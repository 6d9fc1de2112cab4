"""4-bit and 8-bit products in C.

torch's products for these precisions read a CPU without AVX-512 at a third of its memory's speed.
A row's products are summed as integers (``integer.c``).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p

import torch
from torch.nn.functional import pad

from flowspec.errors import ModelError
from flowspec.model.kernels.base import Packed
from flowspec.model.kernels.compiled import ROWS, compiled
from flowspec.model.weights.quantise import Weight, unpacked

_ARGUMENTS = (
    *(c_int, c_int, c_void_p, c_void_p),  # bits, how they share scales, weights, scales
    *(c_long, c_long),  # outputs, inputs
    *(c_void_p, c_long, c_int),  # rows, count, half
    *(c_void_p, c_long, c_int),  # found, numbers from one of its rows to the next, threads
)
#: Inputs that share a scale of a row.
_BLOCK = 32
#: Outputs that lie side by side.
_SHARE = 8
#: Weights repacked at a time; bounds the memory of the intermediate forms.
_SLICE = 1 << 20


class PackedMatrix(ctypes.Structure):
    """Packed weights, as the sources have them."""

    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bits", c_long),
        ("blocked", c_long),
        ("outputs", c_long),
        ("inputs", c_long),
    )


class Integer:
    """Codes of ``bits`` by rows of 16 bits, of which 32 share a scale."""

    device = "cpu"

    def __init__(self, bits: int) -> None:
        self.name = f"cc-w{bits}a16"
        self.precisions = {4: ("int4",), 8: ("int8", "int8-block")}[bits]
        self._bits = bits

    def missing(self) -> str:
        found = compiled()
        return found if isinstance(found, str) else ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return inputs % _BLOCK == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        library = compiled()
        assert weight.scales is not None and not isinstance(library, str)
        products_of = library.multiply
        products_of.argtypes = _ARGUMENTS
        codes = _interleaved(weight.codes, self._bits)
        scales = _side_by_side(weight.scales, 2 if self._bits == 4 else 1)
        outputs, inputs = weight.shape
        kind = self._bits, (weight.precision.block > 0) + weight.from_zero
        matrix = PackedMatrix(codes.data_ptr(), scales.data_ptr(), *kind, outputs, inputs)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            if given.dtype not in ROWS or given.shape[1] != inputs:
                raise ModelError(f"rows of {given.dtype}, {given.shape[1]} wide; {inputs} expected")
            kept = given.contiguous()
            products = kept.new_empty((kept.shape[0], outputs))
            if products_of(
                *(*kind, codes.data_ptr(), scales.data_ptr(), outputs, inputs),
                *(kept.data_ptr(), kept.shape[0], kept.dtype == torch.bfloat16),
                *(products.data_ptr(), outputs, torch.get_num_threads()),
            ):
                raise MemoryError(f"no memory for a product of {kept.shape[0]} rows")
            return products

        return Packed(multiply, codes.nbytes + scales.nbytes, matrices=(matrix,))


def _side_by_side(scales: torch.Tensor, kinds: int) -> torch.Tensor:
    """``[outputs, kinds x blocks]`` as ``[outputs / 8, blocks, kinds, 8]``, with zeros of none."""
    shares = _shares(scales)
    return shares.reshape(*shares.shape[:2], kinds, -1).permute(0, 3, 2, 1).contiguous()


def _interleaved(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as the products read them, of 8 outputs side by side: ``integer.c`` says how."""
    outputs, inputs = codes.shape[0], codes.shape[1] * 8 // bits
    found = torch.empty((-(-outputs // _SHARE), _SHARE * inputs * bits // 8), dtype=torch.int8)
    step = max(1, _SLICE // (_SHARE * inputs))
    for at in range(0, len(found), step):
        shares = _shares(codes[at * _SHARE : (at + step) * _SHARE])
        if bits == 8:
            pairs = shares.reshape(len(shares), _SHARE, -1, 2).transpose(1, 2)
        else:
            by_place = unpacked(shares).short().reshape(len(shares), _SHARE, -1, 4, 2)
            first, second, third, fourth = by_place.transpose(1, 2).unbind(3)
            words = first | second << 4 | third << 8 | fourth << 12
            pairs = words.contiguous().view(torch.int8)
        found[at : at + step] = pairs.reshape(len(shares), -1)
    return found


def _shares(rows: torch.Tensor) -> torch.Tensor:
    """``[outputs, ...]`` as ``[outputs / 8, 8, ...]``, the last ones with zeros below them."""
    return pad(rows, (0, 0, 0, -len(rows) % _SHARE)).view(-1, _SHARE, rows.shape[1])
