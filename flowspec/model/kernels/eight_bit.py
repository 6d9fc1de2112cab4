"""The 8-bit kernel of CPUs for which the products in C cannot be compiled."""

from __future__ import annotations

import torch

from flowspec.model.kernels.base import Packed
from flowspec.model.weights.quantise import Weight


class Int8Weights:
    """torch's ``_weight_int8pack_mm``: int8 weights by bfloat16 rows.

    Of rows that do not come out even in 16 inputs it reads numbers behind their end.
    """

    name = "int8pack"
    precisions = ("int8",)
    device = "cpu"

    def missing(self) -> str:
        return "" if hasattr(torch, "_weight_int8pack_mm") else "this torch has no int8 product"

    def takes(self, outputs: int, inputs: int) -> bool:
        return inputs % 16 == 0

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
