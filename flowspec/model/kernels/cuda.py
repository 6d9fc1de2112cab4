"""Quantised kernels of CUDA devices: bitsandbytes', and torch's own int4 product (tinygemm)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flowspec.model.kernels.base import Packed, in_slices
from flowspec.model.kernels.four_bit import NOT_INSTALLED, TABULATED, bitsandbytes
from flowspec.model.weights.quantise import TABLES, Weight, doubly_scaled

_TINYGEMM_TILES = 8
_AMPERE = (8, 0)
_TURING = (7, 5)
_NO_DEVICE = "no CUDA device is available"
#: Bytes of an input, and the largest number in them. They hold 8,355,711 around zero, which the
#: rounding of a row's scale must not exceed.
_BYTES = 3
_LARGEST_CODE = 8_355_000
#: The byte that stands for zero.
ZERO = 128
#: Products of an unsigned byte and a signed code that a sum of 32 bits holds.
_MOST_INPUTS = (2**31 - 1) // (255 * 127)


class TinyGemm:
    """``_weight_int4pack_mm``, in torch itself: its time is flat up to 16 rows.

    Needs a device of compute capability 8.0 or higher, and bfloat16 rows.
    """

    name = "tinygemm"
    precisions = ("int4",)
    device = "cuda"

    def missing(self) -> str:
        if not torch.cuda.is_available():
            return _NO_DEVICE
        if torch.cuda.get_device_capability() < _AMPERE:
            return "this GPU is older than compute capability 8.0, which torch's int4 product needs"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return outputs % 8 == 0 and inputs % (_TINYGEMM_TILES * 16) == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        held = torch._convert_weight_to_int4pack(weight.codes.to(device), _TINYGEMM_TILES)
        both = [part.t() for part in weight.scales_and_middles]
        pairs = torch.stack(both, dim=-1).to(device, rows).contiguous()
        block = weight.precision.block

        def multiply(given: torch.Tensor) -> torch.Tensor:
            return torch._weight_int4pack_mm(given.contiguous(), held, block, pairs)

        return Packed(multiply, held.nbytes + pairs.nbytes)


class BitsAndBytesCuda:
    """bitsandbytes on CUDA, in slices: its path depends on how many rows there are.

    Double-quantised maxima stay so in memory, and are computed for every product, as bitsandbytes
    does with its own.
    """

    name = "bitsandbytes"
    precisions = TABULATED
    device = "cuda"

    def missing(self) -> str:
        if not torch.cuda.is_available():
            return _NO_DEVICE
        return "" if bitsandbytes() else NOT_INSTALLED

    def takes(self, outputs: int, inputs: int) -> bool:
        return inputs % 64 == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        package = bitsandbytes()
        assert package is not None
        codes = weight.codes.reshape(-1, 1).to(device)
        state = partial(
            package.functional.QuantState,
            shape=torch.Size(weight.shape),
            code=torch.tensor(TABLES[weight.precision.table], device=device),
            blocksize=weight.precision.block,
            quant_type=weight.precision.table,
            dtype=rows,
        )
        held, maxima = _maxima(weight, device)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            now = state(absmax=maxima())
            return in_slices(lambda part: package.matmul_4bit(part, codes.t(), now), given)

        return Packed(multiply, codes.nbytes + held)


class Int8:
    """torch's ``_int_mm``, of rows of 24 bits as three rows of int8 each, summed in int32.

    Rows are quantised one by one: with one scale for all rows of a pass, a row's result would
    depend on its siblings by several percent. Some inputs of real models are thousands of times as
    large as the rest of their row (SmolLM2's first token: 4,570 times its root mean square), hence
    24 bits.

    bitsandbytes' product gives wrong sums for few rows, on an H200 with CUDA 13.
    """

    name = "int8mm"
    precisions = ("int8",)
    device = "cuda"

    def missing(self) -> str:
        if not torch.cuda.is_available():
            return _NO_DEVICE
        if torch.cuda.get_device_capability() < _TURING:
            return "this GPU is older than compute capability 7.5, which int8 products need"
        return "" if hasattr(torch, "_int_mm") else "this torch has no int8 product for CUDA"

    def takes(self, outputs: int, inputs: int) -> bool:
        return outputs % 8 == 0 and inputs % 8 == 0 and inputs <= _MOST_INPUTS

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        assert weight.scales is not None
        codes = weight.codes.to(device)
        scales = weight.scales.flatten().to(device)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            parts, own = in_bytes(given)
            signed = parts.bitwise_xor(ZERO).view(torch.int8)
            products = torch._int_mm(signed, codes.t())
            return joined(products.float() * scales, own).to(given.dtype)

        return Packed(partial(in_slices, multiply), codes.nbytes + scales.nbytes)


def in_bytes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows``, ``[rows, inputs]``, as uint8 ``[3 x rows, inputs]`` and float32 scales a row.

    The lowest bytes of all rows come first, the highest last, each above ``ZERO``: a value is
    (low - 128 + 256 x (middle - 128) + 65536 x (high - 128)) x scale.
    """
    count, inputs = rows.shape
    wide = rows.float()
    tiny = torch.finfo(torch.float32).tiny
    scales = (wide.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE).clamp_min(tiny)
    codes = (wide / scales).round_().add_(ZERO * (1 + 256 + 256**2)).to(torch.int32)
    lowest_first = codes.view(torch.uint8).view(count, inputs, 4)[:, :, :_BYTES]
    return lowest_first.permute(2, 0, 1).reshape(_BYTES * count, inputs), scales


def joined(products: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The products of rows from those of their bytes, ``[3 x rows, outputs]``, float32."""
    low, middle, high = products.chunk(_BYTES)
    return torch.add(low, middle, alpha=256).add_(high, alpha=256**2).mul_(scales)


def _maxima(weight: Weight, device: torch.device) -> tuple[int, Callable[[], torch.Tensor]]:
    """Bytes of the maxima in memory, and what returns them in float32, one after the other."""
    if weight.scales is None or weight.row_scales is None:
        plain = weight.maxima.flatten().float().to(device)
        return plain.nbytes, lambda: plain
    scales, row_scales = weight.scales.to(device), weight.row_scales.to(device)
    size = scales.nbytes + row_scales.nbytes
    return size, lambda: doubly_scaled(scales, row_scales).flatten().float()
