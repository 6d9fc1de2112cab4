"""4-bit kernels of the CPU: bitsandbytes' for nf4 and fp4, torch's own for int4."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from types import ModuleType

import torch

from flowspec.errors import installs
from flowspec.model.kernels.base import Packed
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import TABLES, Weight, unpacked

#: The precisions of bitsandbytes' kernels.
TABULATED = tuple(name for name, precision in PRECISIONS.items() if precision.table)
_NEEDED = {"avx512f", "avx512_bf16"}
#: Rows of the matrix that bitsandbytes packs together.
_TOGETHER = 32
#: Rows that torch packs together; 64 on CPUs with AVX-512, 16 or 32 on others.
_INT4_TOGETHER = 64
#: Weights repacked at a time; bounds the memory of the intermediate forms.
_SLICE = 1 << 20
NOT_INSTALLED = f"the package bitsandbytes is not installed: {installs('flowspec[quantised]')}"


@lru_cache(maxsize=1)
def bitsandbytes() -> ModuleType | None:
    """The package; None if it is not installed or cannot be loaded.

    With the package ``kernels`` beside it, its import would download code, so the hub is offline
    during the import; that it could not download any is no warning to a user.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import bitsandbytes as package
    except (ImportError, OSError, RuntimeError):
        return None
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
    found: ModuleType = package
    return found


class BitsAndBytes:
    """bitsandbytes' packed kernel for CPUs with AVX-512 and its bfloat16 instructions.

    It takes maxima in bfloat16, so double-quantised ones are brought into that when packed. Its
    other CPU path writes the whole matrix out for every product, which takes 20 times as long,
    and is not used.
    """

    name = "bitsandbytes"
    precisions = TABULATED
    device = "cpu"

    def missing(self) -> str:
        package = bitsandbytes()
        if package is None:
            return NOT_INSTALLED
        if not package.functional.has_avx512bf16():
            if cpu_flags() >= _NEEDED:
                return "bitsandbytes has loaded its library for a GPU, which lacks that for the CPU"
            return "this CPU has no AVX-512 bfloat16 instructions, which bitsandbytes' kernel needs"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return outputs % _TOGETHER == 0 and inputs % 64 == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        codes = torch.empty_like(weight.codes)
        step = max(1, _SLICE // (weight.shape[1] * _TOGETHER)) * _TOGETHER
        for at in range(0, weight.shape[0], step):
            codes[at : at + step] = _interleaved(weight.codes[at : at + step])
        maxima = weight.maxima.t().contiguous()
        table = torch.tensor(TABLES[weight.precision.table])
        shape = list(weight.shape)
        block = weight.precision.block

        def multiply(given: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.ops.bitsandbytes.gemv_4bit.default(
                given, codes, shape, maxima, table, block
            )
            return product

        return Packed(multiply, codes.nbytes + maxima.nbytes)


class Int4:
    """torch's ``_weight_int4pack_mm_for_cpu``, for x86 and ARM."""

    name = "int4pack"
    precisions = ("int4",)
    device = "cpu"

    def missing(self) -> str:
        if not hasattr(torch, "_weight_int4pack_mm_for_cpu"):
            return "this torch has no int4 product for the CPU; install torch 2.6 or later"
        return ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return outputs % 16 == 0 and inputs % 32 == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        held = torch.empty_like(weight.codes)
        step = max(1, _SLICE // (weight.shape[1] * _INT4_TOGETHER)) * _INT4_TOGETHER
        for at in range(0, weight.shape[0], step):
            codes = unpacked(weight.codes[at : at + step]).int()
            held[at : at + step] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        both = [part.t() for part in weight.scales_and_middles]
        pairs = torch.stack(both, dim=-1).to(rows).contiguous()
        block = weight.precision.block

        def multiply(given: torch.Tensor) -> torch.Tensor:
            return torch._weight_int4pack_mm_for_cpu(given.contiguous(), held, block, pairs)

        return Packed(multiply, held.nbytes + pairs.nbytes)


def _interleaved(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 32 rows together, pairs of columns side by side, as the kernel reads them."""
    single = unpacked(codes)
    outputs, inputs = single.shape
    pairs = single.reshape(outputs // _TOGETHER, _TOGETHER, inputs // 2, 2).transpose(1, 2)
    halves = pairs.reshape(-1, 2 * _TOGETHER)
    return (halves[:, _TOGETHER:] << 4 | halves[:, :_TOGETHER]).reshape(outputs, inputs // 2)
