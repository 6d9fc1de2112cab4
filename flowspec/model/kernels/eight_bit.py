"""8-bit kernels. Rows are quantised one by one, so that none depends on its neighbours' values.

A kernel with one scale for all rows of a pass would let a row's result depend on its siblings by
several percent, and could not verify. Some inputs of real models are thousands of times as large as
the rest of their row (SmolLM2's first token: 4,570 times its root mean square), so a row with one
scale has 24 bits.
"""

from __future__ import annotations

import torch

from flowspec.model.kernels.base import Packed
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.quantise import Weight

#: Bytes of an input, and the largest number in them. They hold 8,355,711 around zero, which the
#: rounding of a row's scale must not exceed.
_BYTES = 3
_LARGEST_CODE = 8_355_000
#: The byte that stands for zero.
ZERO = 128
#: Products of an unsigned byte and a signed code that a sum of 32 bits holds.
MOST_INPUTS = (2**31 - 1) // (255 * 127)


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


class OneDnnW8A24:
    """oneDNN, int8 weights by rows of 24 bits, as three rows of uint8 each, summed in int32.

    The signed form of the same product takes 70 times as long.
    """

    name = "onednn-w8a24"
    precisions = ("int8",)
    device = "cpu"

    def missing(self) -> str:
        if not hasattr(torch.ops.onednn, "qlinear_prepack"):
            return "this torch has no quantised oneDNN product"
        if not cpu_flags() & {"avx512_vnni", "avx_vnni"}:
            return "this CPU has no VNNI instructions, without which the product may overflow"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return inputs <= MOST_INPUTS

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        assert weight.scales is not None
        held = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        scales = weight.scales.flatten().contiguous()
        zeros = torch.zeros(weight.shape[0], dtype=torch.int32)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            codes, own = in_bytes(given)
            products = torch.ops.onednn.qlinear_pointwise(
                *(codes, 1.0, ZERO, held, scales, zeros, None, 1.0, 0, torch.float32),
                *("none", [], ""),
            )
            return joined(products, own).to(given.dtype)

        return Packed(multiply, weight.nbytes)


class Int8Weights:
    """torch's ``_weight_int8pack_mm``: int8 weights by bfloat16 rows, for CPUs without VNNI."""

    name = "int8pack"
    precisions = ("int8",)
    device = "cpu"

    def missing(self) -> str:
        return "" if hasattr(torch, "_weight_int8pack_mm") else "this torch has no int8 product"

    def takes(self, outputs: int, inputs: int) -> bool:
        return True

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        assert weight.scales is not None
        codes = weight.codes
        ones = torch.ones(weight.shape[0], dtype=torch.bfloat16)
        scales = weight.scales.flatten()

        def multiply(given: torch.Tensor) -> torch.Tensor:
            # The product would round scales to bfloat16, and so change the weights' values.
            whole = torch._weight_int8pack_mm(given.bfloat16().contiguous(), codes, ones)
            return (whole.float() * scales).to(given.dtype)

        return Packed(multiply, weight.nbytes)
