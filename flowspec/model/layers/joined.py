"""Linear layers over the same rows as one product: queries, keys and values; gate and up.

A small product takes the time of the call. The matrices of a group lie one above the other in one
packing, which replaces theirs, so a model takes no more memory. It is done only where the product's
columns have the same bits as those of separate products, which is tried at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from flowspec.model.kernels import kernels_for
from flowspec.model.kernels.base import Kernel
from flowspec.model.layers.linear import COUNTS, MOST, KernelLinear, Matrix, kernel_for
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, quantise

#: Names of linear layers of one module that multiply the same rows.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Most weights of a group: a larger product takes so long that the calls no longer count.
MOST_WEIGHTS = 1 << 22


class JoinedPart(torch.nn.Module):
    """One linear layer of a group, for who runs it alone: columns of ``whole`` from ``begin``."""

    def __init__(self, whole: KernelLinear, begin: int, end: int) -> None:
        super().__init__()
        self.whole = whole
        self.columns = slice(begin, end)
        self.out_features = end - begin
        self.in_features = whole.in_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        found: torch.Tensor = self.whole(rows)[..., self.columns]
        return found


class Stack:
    """Matrices of equal width as one, the first on top."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = matrices

    @property
    def shape(self) -> tuple[int, ...]:
        """``(outputs, inputs)``."""
        outputs = sum(matrix.shape[0] for matrix in self._matrices)
        return (outputs, self._matrices[0].shape[1])

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the whole; errors as those of the matrices."""
        parts = []
        above = 0
        for matrix in self._matrices:
            height = matrix.shape[0]
            first = max(rows.start - above, 0)
            end = min(rows.stop - above, height)
            if first < end:
                parts.append(matrix.read(range(first, end), precision))
            above += height
        columns = zip(*(part.tensors for part in parts), strict=True)
        shape = (len(rows), self.shape[1])
        return Weight(PRECISIONS[precision], shape, *map(torch.cat, columns))


def groups_among(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The groups whose members are all among ``names`` of modules."""
    known = set(names)
    owners = sorted({name.rpartition(".")[0] for name in known})
    found = [tuple(f"{owner}.{leaf}" for leaf in group) for owner in owners for group in GROUPS]
    return [group for group in found if known.issuperset(group)]


def grouped(
    linears: Mapping[str, torch.nn.Linear],
    precision: str,
    rows: torch.dtype,
    device: torch.device,
) -> list[tuple[str, ...]]:
    """Names of ``linears``, those together that are to be one product; most are alone."""
    joined = []
    for group in groups_among(linears):
        members = [linears[name] for name in group]
        shapes = [(member.out_features, member.in_features) for member in members]
        alike = len({member.bias is None for member in members}) == 1
        if alike and joinable(shapes, precision, rows, device):
            joined.append(group)
    taken = {name for group in joined for name in group}
    return [*joined, *((name,) for name in linears if name not in taken)]


def parts_of(whole: KernelLinear, heights: Sequence[int]) -> list[JoinedPart]:
    """The layers of a group with so many outputs, in its order."""
    ends = list(accumulate(heights))
    return [JoinedPart(whole, *columns) for columns in zip([0, *ends[:-1]], ends, strict=True)]


def joinable(
    shapes: Sequence[tuple[int, int]], precision: str, rows: torch.dtype, device: torch.device
) -> bool:
    """Whether matrices of ``shapes``, ``(outputs, inputs)``, are to be one product."""
    inputs = shapes[0][1]
    outputs = sum(shape[0] for shape in shapes)
    if device.type != "cpu" or outputs * inputs > MOST_WEIGHTS:
        return False
    held = {PRECISIONS[precision].for_matrix(shape).name for shape in (*shapes, (outputs, inputs))}
    if len(held) > 1:
        return False
    kernels = kernels_for(held.pop(), device.type)
    chosen = {kernel_for(kernels, shape).name for shape in (*shapes, (outputs, inputs))}
    return len(chosen) == 1 and _equal(tuple(shapes), precision, rows)


@lru_cache(maxsize=64)
def _equal(shapes: tuple[tuple[int, int], ...], precision: str, rows: torch.dtype) -> bool:
    """Whether one product of random matrices has the bits of the separate ones."""
    inputs = shapes[0][1]
    whole = (sum(shape[0] for shape in shapes), inputs)
    held = PRECISIONS[precision].for_matrix(whole).name
    kernel = kernel_for(kernels_for(held, "cpu"), whole)
    source = torch.Generator().manual_seed(inputs)
    weight = quantise([torch.randn(whole, generator=source)], whole, held)
    return same_products(kernel, weight, [shape[0] for shape in shapes], rows, source)


@torch.inference_mode()
def same_products(
    kernel: Kernel,
    weight: Weight,
    heights: Sequence[int],
    rows: torch.dtype,
    source: torch.Generator,
) -> bool:
    """Whether ``kernel`` gives the same bits by ``weight`` and by its parts of ``heights`` rows.

    At every tested number of random rows of type ``rows``.
    """
    device = torch.device("cpu")
    inputs = weight.shape[1]
    parts = []
    begin = 0
    for height in heights:
        end = begin + height
        stored = [tensor[begin:end] for tensor in weight.tensors]
        part = Weight(weight.precision, (height, inputs), *stored)
        parts.append(kernel.pack(part, rows, device))
        begin = end
    joined = kernel.pack(weight, rows, device)
    given = torch.randn((MOST, inputs), generator=source).to(rows)
    return all(
        torch.equal(
            joined.multiply(given[:count]),
            torch.cat([part.multiply(given[:count]) for part in parts], dim=-1),
        )
        for count in (*COUNTS, MOST)
    )
