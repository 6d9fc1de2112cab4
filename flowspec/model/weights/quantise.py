"""Quantised weights: their values, whatever kernel multiplies by them later.

A matrix is ``[outputs, inputs]``; every scale belongs to one row of it, so that rows can be
quantised in slices and a whole matrix never exists in more than its stored and its quantised form.

    int8        codes int8 [outputs, inputs], one float32 scale a row; value = code x scale
    int8-block  the same with one scale for 32 codes, the scheme of ggml's Q8_0
    int4        two codes a byte [outputs, inputs / 2], first in the high bits; for 32 codes one
                bfloat16 scale and, behind all of a row's scales, the bfloat16 middle of their
                range; value = (code - 8) x scale + middle. Of a GGUF file both are float16, and in
                the middles' place are the values of the code 0, as ggml's Q4_1 has them
    nf4, fp4    two codes a byte, one bfloat16 maximum for 64 codes; value = table[code] x maximum
                (bitsandbytes; arXiv 2305.14314, section 3; its CPU kernels round the maxima too)
    nf4-double, fp4-double
                the same codes, and the maxima quantised in their turn (double quantisation, same
                section): uint8 [outputs, blocks] and one float32 scale a row; maximum = code x
                scale. The paper's blocks of 256 maxima go across rows, these are rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flowspec.errors import ModelError
from flowspec.model.weights.precision import PRECISIONS, Precision

#: The 16 values of the 4-bit tables, by code, relative to the largest magnitude of a block.
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25),
        *(-0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25),
    ),
}
#: Numbers of steps between a block's least and largest value that int4 chooses from.
STEPS = (15, 14, 13, 12, 11, 10)
_DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Weight:
    """A linear layer's weights in ``precision``: ``codes``, and ``scales`` if it has any.

    Dense weights are ``codes`` themselves, ``[outputs, inputs]`` in that type. ``row_scales``: what
    double-quantised ``scales`` are multiples of, float32 ``[outputs, 1]``.
    """

    precision: Precision
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The stored tensors, in the order of ``code_layout``."""
        stored = (self.codes, self.scales, self.row_scales)
        return tuple(tensor for tensor in stored if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def from_zero(self) -> bool:
        """Whether the scales of int4 come with values of the code 0, not with middles."""
        return self.scales is not None and self.scales.dtype == torch.float16

    @property
    def scales_and_middles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of int4: both float32 ``[outputs, blocks]``."""
        assert self.scales is not None
        scales, middles = self.scales.float().chunk(2, dim=-1)
        return scales, middles + 8 * scales if self.from_zero else middles

    @property
    def maxima(self) -> torch.Tensor:
        """The scales as kernels multiply by them: double-quantised ones as bfloat16."""
        assert self.scales is not None
        if self.row_scales is None:
            return self.scales
        return doubly_scaled(self.scales, self.row_scales)


def doubly_scaled(scales: torch.Tensor, row_scales: torch.Tensor) -> torch.Tensor:
    """The maxima, bfloat16 ``[outputs, blocks]``, of a double-quantised matrix."""
    return (scales.float() * row_scales).bfloat16()


def quantise(values: Iterable[torch.Tensor], shape: tuple[int, int], precision: str) -> Weight:
    """The weights in ``values``, consecutive slices of rows of any float type, in ``precision``.

    ModelError if the precision cannot hold ``shape``.
    """
    kind = PRECISIONS[precision]
    stored = [
        torch.empty(form, dtype=dtype)
        for dtype, form in zip(*code_layout(shape, precision), strict=True)
    ]
    at = 0
    for part in values:
        end = at + part.shape[0]
        found = _quantised(part.float(), kind) if kind.quantised else (part,)
        for tensor, rows in zip(stored, found, strict=True):
            tensor[at:end] = rows
        at = end
    return Weight(kind, shape, *stored)


def code_layout(
    shape: tuple[int, int], precision: str
) -> tuple[list[torch.dtype], list[tuple[int, int]]]:
    """Types and shapes of the tensors of a matrix of ``shape``: codes, scales, rows' scales.

    ModelError if the precision cannot hold it.
    """
    kind = PRECISIONS[precision]
    outputs, inputs = shape
    if kind.block and inputs % kind.block:
        raise ModelError(
            f"a layer with {inputs} inputs cannot be held in {precision}, "
            f"whose scales are for {kind.block} weights each; use int8 or a 16-bit type"
        )
    codes = (_code_type(kind), _code_shape(kind, shape))
    if not kind.quantised:
        return [codes[0]], [codes[1]]
    blocks = inputs // kind.block if kind.block else 1
    scales = (_scale_type(kind), (outputs, 2 * blocks if kind.name == "int4" else blocks))
    if not kind.double:
        return [codes[0], scales[0]], [codes[1], scales[1]]
    return [codes[0], scales[0], torch.float32], [codes[1], scales[1], (outputs, 1)]


def dequantise(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The values of ``weight``, ``[outputs, inputs]``, computed in float32 and rounded once."""
    if weight.scales is None:
        return weight.codes.to(dtype)
    kind = weight.precision
    if kind.bits == 8:
        blocks = weight.codes.float().view(*weight.scales.shape, -1) * weight.scales.unsqueeze(-1)
        return blocks.view(weight.shape).to(dtype)
    codes = unpacked(weight.codes).view(weight.shape[0], -1, kind.block)
    if kind.name == "int4":
        scales, others = weight.scales.float().unsqueeze(-1).chunk(2, dim=1)
        blocks = codes.float().sub_(0 if weight.from_zero else 8) * scales + others
    else:
        blocks = torch.tensor(TABLES[kind.table])[codes.int()] * weight.maxima.float().unsqueeze(-1)
    return blocks.view(weight.shape).to(dtype)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes one a byte, ``[outputs, inputs]``, from two a byte."""
    return torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    pairs = codes.to(torch.uint8).view(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] << 4 | pairs[..., 1]


def _code_shape(kind: Precision, shape: tuple[int, int]) -> tuple[int, int]:
    return (shape[0], shape[1] * kind.bits // 8) if kind.bits < 8 else shape


def _code_type(kind: Precision) -> torch.dtype:
    if not kind.quantised:
        return _DENSE[kind.name]
    return torch.int8 if kind.bits == 8 else torch.uint8


def _scale_type(kind: Precision) -> torch.dtype:
    if kind.double:
        return torch.uint8
    return torch.float32 if kind.bits == 8 else torch.bfloat16


def _quantised(values: torch.Tensor, kind: Precision) -> tuple[torch.Tensor, ...]:
    """Codes, scales and rows' scales of some rows, float32 ``[rows, inputs]``.

    A block of equal values has scale 0 in int4, and one of zeros in the others.
    """
    blocks = values.view(values.shape[0], -1, kind.block or values.shape[1])
    if kind.bits == 8:
        scales = blocks.abs().amax(dim=-1, keepdim=True) / 127
        codes = _nearest(blocks, scales).clamp_(-127, 127).to(torch.int8)
        return codes.view(values.shape), scales.squeeze(-1)
    if kind.name == "int4":
        return _evenly(blocks)
    scales = blocks.abs().amax(dim=-1, keepdim=True)
    codes = _nearest_in_table(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny), kind)
    packed = _packed(codes.flatten(-2))
    if not kind.double:
        return packed, scales.squeeze(-1)
    return packed, *_doubly_quantised(scales.squeeze(-1))


def _evenly(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of int4, and scales and middles, of ``[rows, blocks, 32]``.

    Of several numbers of steps between the least value and the largest, the one with the smallest
    error: values that lie on some 16 even levels, as a GGUF file's do, keep their codes.
    """
    least, most = blocks.aminmax(dim=-1, keepdim=True)
    best = torch.full_like(least, math.inf)
    scales = torch.zeros_like(least)
    for steps in STEPS:
        tried = ((most - least) / steps).bfloat16().float()
        levels = _levels(blocks, least, tried)
        error = levels.round().clamp_(-8, 7).sub_(levels).square_().sum(dim=-1, keepdim=True)
        error *= tried.square()
        scales = torch.where(error < best, tried, scales)
        best = torch.minimum(error, best)
    codes = _levels(blocks, least, scales).round_().clamp_(-8, 7) + 8
    both = torch.cat((scales, _middles(least, scales)), dim=-2).squeeze(-1).bfloat16()
    return _packed(codes.flatten(-2)), both


def _middles(least: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the code 8 stands for, so that the code 0 stands for ``least``."""
    return (least + 8 * scales).bfloat16().float()


def _levels(blocks: torch.Tensor, least: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``blocks`` in steps of ``scales`` from the middle; where there are no steps, 0."""
    steps = torch.where(scales == 0, 0.0, 1 / scales)
    return (blocks - _middles(least, scales)).mul_(steps)


def _doubly_quantised(maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of blocks ``[rows, blocks]`` in eight bits, and what one step is in each row."""
    steps = maxima.amax(dim=-1, keepdim=True) / 255
    return _nearest(maxima, steps).to(torch.uint8), steps


def _nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, values / scales).round_()


def _nearest_in_table(values: torch.Tensor, kind: Precision) -> torch.Tensor:
    """The code of the table's value nearest to each of ``values``, which are from -1 to 1."""
    table, order = torch.tensor(TABLES[kind.table]).sort(stable=True)
    middles = (table[1:] + table[:-1]) / 2
    # Counting the smaller middles takes a third of the time of ``torch.bucketize``.
    place = torch.zeros(values.shape, dtype=torch.uint8)
    for middle in middles:
        place += values > middle
    return place if kind.table == "nf4" else order.to(torch.uint8)[place.int()]
