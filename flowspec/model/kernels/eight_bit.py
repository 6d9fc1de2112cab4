"""8-bit kernels. Rows are quantised one by one, so that none depends on its neighbours' values.

A kernel with one scale for all rows of a pass would let a row's result depend on its siblings by
several percent, and could not verify.
"""

from __future__ import annotations

import torch

from flowspec.model.cpu import cpu_flags
from flowspec.model.kernels.base import Packed
from flowspec.model.quantise import Weight

_LARGEST_CODE = 127
_ZERO = 128  # of unsigned codes


class OneDnnW8A8:
    """oneDNN, int8 weights by uint8 rows with a scale each, summed in int32: exact but for scaling.

    The signed form of the same product takes 70 times as long.
    """

    name = "onednn-w8a8"
    precisions = ("int8",)
    device = "cpu"

    def missing(self) -> str:
        if not hasattr(torch.ops.onednn, "qlinear_prepack"):
            return "this torch has no quantised oneDNN product"
        if not cpu_flags() & {"avx512_vnni", "avx_vnni"}:
            return "this CPU has no VNNI instructions, without which the product may overflow"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return True

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        assert weight.scales is not None
        held = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        scales = weight.scales.flatten().contiguous()
        zeros = torch.zeros(weight.shape[0], dtype=torch.int32)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            wide = given.float()
            own = (wide.abs().amax(dim=-1, keepdim=True) / _LARGEST_CODE).clamp_min(
                torch.finfo(torch.float32).tiny
            )
            codes = (wide / own).round_().add_(_ZERO).to(torch.uint8)
            product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
                *(codes, 1.0, _ZERO, held, scales, zeros, None, 1.0, 0, torch.float32),
                *("none", [], ""),
            )
            return product.mul_(own).to(given.dtype)

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
