"""Dense kernels: torch's own product, oneDNN's with packed weights, fbgemm's with fp16 weights."""

from __future__ import annotations

from functools import partial

import torch

from flowspec.model.kernels.base import Multiply, Packed, in_slices, padded
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.quantise import Weight, dequantise

_PACKED_FOR_ROWS = 16
_AMX_SLICE = 32


class Torch:
    """``torch.nn.functional.linear`` over the dequantised values; runs everywhere."""

    name = "torch"
    precisions = ("float32", "bfloat16", "float16")

    def __init__(self, device: str) -> None:
        self.device = device

    def missing(self) -> str:
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return True

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        values = dequantise(weight, rows).to(device)
        multiply = partial(_linear, weight=values)
        if device.type == "cuda":
            multiply = partial(in_slices, multiply)
        return Packed(multiply, values.nbytes)


class OneDnn:
    """oneDNN with weights packed once, in float32 or bfloat16.

    At 16 rows it takes half the time of ``torch`` in float32. A lone row is computed by another
    path, so it is padded. With AMX so are large products of more than 17 bfloat16 rows: 32 take a
    quarter longer than one.
    """

    name = "onednn"
    device = "cpu"

    def __init__(self, precision: str) -> None:
        self.precisions = (precision,)

    def missing(self) -> str:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "torch was built without oneDNN"
        if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this torch has no packed oneDNN product; install torch 2.6 or later for x86"
        if "bfloat16" in self.precisions and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU lacks the instructions with which oneDNN packs bfloat16 (AVX-512)"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return True

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        values = dequantise(weight, rows)
        held = torch.ops.mkldnn._reorder_linear_weight(values, _PACKED_FOR_ROWS)

        def multiply(given: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                given, held, None, "none", [], ""
            )
            return product

        if rows == torch.bfloat16 and "amx_bf16" in cpu_flags():
            return Packed(partial(in_slices, multiply, size=_AMX_SLICE), values.nbytes)
        return Packed(padded(multiply), values.nbytes, pads=True)


class Fbgemm:
    """fbgemm with float16 weights and float32 rows: half the memory, other roundings than none.

    With AVX2 it takes up to six rows at a time, and one or two that are left by another path.
    """

    name = "fbgemm"
    precisions = ("float16",)
    device = "cpu"

    def missing(self) -> str:
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return "torch was built without fbgemm, which needs an x86 CPU with AVX2"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return True

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        held = torch.ops.quantized.linear_prepack_fp16(dequantise(weight, torch.float32), None)
        multiply = partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=held)
        if "avx512f" not in cpu_flags():
            multiply = partial(_three_at_the_end, multiply)
        return Packed(multiply, weight.codes.nbytes)


def _three_at_the_end(multiply: Multiply, rows: torch.Tensor) -> torch.Tensor:
    """``multiply`` with zeros below one or two rows that are left after those by six."""
    count = rows.shape[0]
    lacking = 3 - count % 6 if count % 6 in (1, 2) else 0
    return multiply(torch.nn.functional.pad(rows, (0, 0, 0, lacking)))[:count]


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(rows, weight)
