"""One product for several linear layers has the bits of separate ones, and takes their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.model.kernels import KERNELS
from flowspec.model.kernels.base import Kernel
from flowspec.model.layers import joined, lean
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.joined import JoinedPart, Stack, groups_among, joinable, same_products
from flowspec.model.layers.linear import KernelLinear
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, quantise
from tests.marks import crossed, examples
from tests.model.test_lean import PLAIN, block_of, passes
from tests.precisions import FOUR_BITS, SERVED

Family = Callable[..., ModelDirectory]
CPU = torch.device("cpu")
CASES = [
    pytest.param(kernel, precision, id=f"{kernel.name}-{precision}")
    for kernel in KERNELS
    if kernel.device == "cpu" and not kernel.missing()
    for precision in kernel.precisions
]
#: Kernels in 4 bits take 32 rows of a matrix together, and 64 columns.
heights = st.lists(st.integers(1, 12).map(lambda times: 32 * times), min_size=2, max_size=3)
widths = st.integers(1, 6).map(lambda times: 64 * times)


class Matrix:
    """A matrix of random values in memory."""

    def __init__(self, shape: tuple[int, int]) -> None:
        source = torch.Generator().manual_seed(shape[0])
        self.shape = shape
        self.values = torch.randn(shape, generator=source)

    def read(self, rows: range, precision: str) -> Weight:
        shape = (len(rows), self.shape[1])
        return quantise([self.values[rows.start : rows.stop]], shape, precision)


@pytest.mark.parametrize(("kernel", "precision"), CASES)
@settings(deadline=None, max_examples=examples(12))
@given(heights=heights, inputs=widths, seed=st.integers(0, 9))
def test_a_joined_product_has_the_bits_of_separate_ones(
    kernel: Kernel, precision: str, heights: list[int], inputs: int, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    shape = (sum(heights), inputs)
    weight = quantise([torch.randn(shape, generator=source)], shape, precision)
    rows = getattr(torch, PRECISIONS[precision].rows_on("cpu"))
    assert same_products(kernel, weight, heights, rows, source)


def test_a_product_whose_bits_differ_is_seen() -> None:
    class Other:
        def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> object:
            packed = KERNELS[0].pack(weight, rows, device)
            near = weight.shape[0] > 32
            multiply = packed.multiply
            return type("P", (), {"multiply": lambda self, x: multiply(x) * (1 + 1e-6 * near)})()

    source = torch.Generator().manual_seed(0)
    weight = quantise([torch.randn((64, 64), generator=source)], (64, 64), "float32")
    assert not same_products(Other(), weight, (32, 32), torch.float32, source)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=examples(40))
@given(data=st.data(), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_rows_of_a_stack_are_those_of_its_matrices(data: st.DataObject, sizes: list[int]) -> None:
    matrices = [Matrix((size, 64)) for size in sizes]
    stack = Stack(matrices)
    whole = torch.cat([matrix.values for matrix in matrices])
    assert stack.shape == whole.shape
    first = data.draw(st.integers(0, sum(sizes) - 1))
    end = data.draw(st.integers(first + 1, sum(sizes)))
    for precision in ("float32", "int8", FOUR_BITS, "nf4-double"):
        found = stack.read(range(first, end), precision)
        expected = quantise([whole[first:end]], (end - first, 64), precision)
        assert len(found.tensors) == len(expected.tensors)
        assert all(map(torch.equal, found.tensors, expected.tensors))


def test_groups_are_whole_and_of_one_module() -> None:
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "b.q_proj", "b.gate_proj", "b.up_proj", "c.down"]
    assert groups_among(names) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("b.gate_proj", "b.up_proj"),
    ]


def test_only_small_products_of_one_kernel_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joinable([(64, 64), (32, 64)], FOUR_BITS, torch.bfloat16, CPU)
    assert not joinable([(64, 64), (33, 64)], FOUR_BITS, torch.bfloat16, CPU), "one has eight bits"
    assert not joinable([(64, 64), (32, 64)], FOUR_BITS, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setattr(joined, "MOST_WEIGHTS", 96 * 64 - 1)
    assert not joinable([(64, 64), (32, 64)], FOUR_BITS, torch.bfloat16, CPU)


def linears(block: LayerBlock) -> int:
    return sum(isinstance(module, KernelLinear) for module in block.modules())


@pytest.mark.parametrize(
    ("name", "dtype"),
    crossed(PLAIN, SERVED),
)
def test_a_joined_model_is_the_one_of_separate_products(
    family: Family, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    whole = block_of(family(name), dtype)
    monkeypatch.setenv(lean.VARIABLE, "library")
    separate = block_of(family(name), dtype)
    layers = len(whole.body.layers)
    assert linears(separate) - linears(whole) == 3 * layers
    assert not any(isinstance(module, JoinedPart) for module in separate.modules())
    assert whole.nbytes == separate.nbytes
    assert whole.dependent_parts() == separate.dependent_parts()
    expected = passes(separate, None)
    for path in (whole.lean, None):
        for ours, theirs in zip(passes(whole, path), expected, strict=True):
            assert torch.equal(ours, theirs)
