"""Every kernel that this machine has: right products, and rows that do not depend on others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowspec.errors import ConfigError, ModelError
from flowspec.model import kernels as module
from flowspec.model.kernels import KERNELS, dense, kernels_for, survey
from flowspec.model.kernels.base import Kernel, Packed, in_slices
from flowspec.model.kernels.cuda import ZERO, in_bytes, joined
from flowspec.model.kernels.dense import Torch
from flowspec.model.layers import linear as linear_module
from flowspec.model.layers.linear import KernelLinear, kernel_for, load_linear, rows_are_independent
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, dequantise, quantise
from tests.precisions import SERVED

CPU = torch.device("cpu")
CASES = [
    pytest.param(kernel, precision, id=f"{kernel.device}-{kernel.name}-{precision}")
    for kernel in KERNELS
    if kernel.device == "cpu" or torch.cuda.is_available()
    for precision in kernel.precisions
]
#: Those whose rows are integers; that of CUDA computes on a CPU too, where it is not used.
EIGHT_BIT = [kernel for kernel in KERNELS if "int8" in kernel.precisions]
SHAPES = [(64, 64), (96, 128), (128, 344), (97, 80), (576, 192), (192, 512), (512, 1024)]
#: Largest difference from a product in float64, relative to the product's size: the rounding of
#: products to bfloat16, and of bitsandbytes' partial sums.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "int8": 3e-3}


def usable(kernel: Kernel) -> None:
    if kernel.missing():
        pytest.skip(kernel.missing())


def row_type(precision: str, device: str = "cpu") -> torch.dtype:
    return getattr(torch, PRECISIONS[precision].rows_on(device))


def linear(kernel: Kernel, precision: str, shape: tuple[int, int]) -> tuple[KernelLinear, Weight]:
    source = torch.Generator().manual_seed(shape[0])
    weight = quantise([torch.randn(shape, generator=source) * 0.05], shape, precision)
    device = torch.device(kernel.device)
    packed = kernel.pack(weight, row_type(precision, kernel.device), device)
    return KernelLinear(shape, packed, kernel.name, None), weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_products_are_those_of_the_values(
    kernel: Kernel, precision: str, shape: tuple[int, int]
) -> None:
    usable(kernel)
    if not kernel.takes(*shape):
        pytest.skip("the kernel does not take this shape")
    layer, weight = linear(kernel, precision, shape)
    for count in (1, 2, 7, 33):
        source = torch.Generator().manual_seed(count)
        rows = torch.randn((count, shape[1]), generator=source)
        rows = rows.to(row_type(precision, kernel.device))
        wanted = rows.double() @ dequantise(weight, torch.float64).t()
        found = layer(rows.to(kernel.device)).cpu()
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE.get(precision, 1e-2), count


@pytest.mark.parametrize("kernel", EIGHT_BIT, ids=lambda kernel: kernel.name)
def test_a_large_input_takes_no_precision_from_the_others(kernel: Kernel) -> None:
    """As in SmolLM2, whose first token has an input 4,570 times as large as the rest of its row."""
    if kernel.device == "cpu":
        usable(kernel)
    source = torch.Generator().manual_seed(0)
    values = torch.randn((96, 256), generator=source)
    values[:, :32] = 0  # what the large input adds is no part of the products, nor is its block
    packed = kernel.pack(quantise([values], (96, 256), "int8"), torch.float32, CPU)
    rows = torch.randn((5, 256), generator=source).bfloat16().float()
    wanted = packed.multiply(rows)
    rows[:, 7] = torch.tensor([100.0, -5e3, 50.0, 0.0, 2e4])
    assert (packed.multiply(rows) - wanted).norm() / wanted.norm() < 5e-3


def test_rows_in_bytes_are_the_rows() -> None:
    """Whatever their largest number is, which a scale that is rounded may make too large."""
    source = torch.Generator().manual_seed(0)
    mantissas = torch.arange(128, 256).float().bfloat16().float()
    largest = torch.cat((mantissas, -mantissas, torch.randn(2000, generator=source) * 1e3))
    rows = torch.rand((len(largest), 8), generator=source) * largest[:, None]
    rows[:, 3] = largest
    parts, scales = in_bytes(rows)
    found = joined(parts.float() - ZERO, scales)
    assert ((found - rows).abs() <= largest.abs()[:, None] * 2.0**-22).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_a_row_does_not_depend_on_its_company(
    kernel: Kernel, precision: str, shape: tuple[int, int]
) -> None:
    usable(kernel)
    if not kernel.takes(*shape):
        pytest.skip("the kernel does not take this shape")
    layer, _ = linear(kernel, precision, shape)
    rows = row_type(precision, kernel.device)
    assert rows_are_independent(layer, shape[1], rows, torch.device(kernel.device))


def test_dependence_is_found() -> None:
    """A scale for all rows of a pass: the largest row changes the roundings of the others."""

    class OneScale(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            scale = rows.abs().max() / 127
            return (rows / scale).round() * scale

    assert not rows_are_independent(OneScale(), 64, torch.float32, CPU)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_slices_take_the_number_of_rows_out_of_a_product(count: int) -> None:
    """One whose path depends on it, as a GPU's do, and those of bfloat16 with AMX."""
    values = torch.randn((64, 8))

    def by_number(rows: torch.Tensor) -> torch.Tensor:
        return rows @ values * len(rows)

    rows = torch.randn((count, 64))
    for size in (32, 64):
        found = in_slices(by_number, rows, size)
        assert found.shape == (count, 8)
        assert torch.equal(found[-1:], in_slices(by_number, rows[-1:], size))


def test_large_bfloat16_products_with_amx_are_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dense.OneDnn("bfloat16")
    usable(kernel)
    monkeypatch.setattr(dense, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    sliced, _ = linear(kernel, "bfloat16", (96, 128))
    assert not sliced.pads
    monkeypatch.setattr(dense, "cpu_flags", frozenset)
    whole, _ = linear(kernel, "bfloat16", (96, 128))
    rows = torch.randn((37, 128)).bfloat16()
    torch.testing.assert_close(sliced(rows), whole(rows))


@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_kernel_that_computes_wrong_products_is_refused(
    lone: bool, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes' int8 product of a lone row does on an H200."""
    pack = Torch.pack

    def broken(self: Torch, *given: Any) -> Packed:
        right = pack(self, *given)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return right.multiply(rows) * (wrong if (len(rows) == 1) == lone else 1)

        return replace(right, multiply=multiply)

    matrix = Held(torch.randn((48, 32)))
    monkeypatch.setattr(linear_module, "kernels_for", lambda *_: (Torch("cpu"),))
    monkeypatch.setattr(linear_module, "_CHECKED", set())
    load_linear(matrix, "float32", torch.float32, CPU)
    monkeypatch.setattr(linear_module, "_CHECKED", set())
    monkeypatch.setattr(Torch, "pack", broken)
    with pytest.raises(
        ModelError, match=r"kernel torch multiplies \d rows? by a matrix of 48 x 32"
    ):
        load_linear(matrix, "float32", torch.float32, CPU)


@pytest.mark.parametrize("size", [0.0, 1e-39])
def test_a_matrix_of_next_to_nothing_tells_nothing_of_its_kernel(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "_CHECKED", set())
    for precision in ("float32", "bfloat16"):
        rows = row_type(precision)
        load_linear(Held(torch.randn((96, 64)) * size), precision, rows, CPU)
        assert not linear_module._CHECKED
    load_linear(Held(torch.randn((96, 64))), "float32", torch.float32, CPU)
    assert linear_module._CHECKED


class Held:
    """A matrix in memory."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.shape = tuple(values.shape)

    def read(self, rows: range, precision: str) -> Weight:
        part = self._values[rows.start : rows.stop]
        return quantise([part], (len(rows), self.shape[1]), precision)


@pytest.mark.parametrize("precision", SERVED)
def test_a_shape_that_no_kernel_takes_is_multiplied_dequantised(precision: str) -> None:
    kernels = kernels_for(precision, "cpu")
    assert kernel_for(kernels, (7, 64)).takes(7, 64)
    layer, weight = linear(kernel_for(kernels, (7, 64)), precision, (7, 64))
    rows = torch.randn((3, 64)).to(row_type(precision))
    wanted = rows.double() @ dequantise(weight, torch.float64).t()
    assert (layer(rows).double() - wanted).norm() / wanted.norm() < 3e-2


def test_a_missing_package_is_one_line_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module.four_bit, "bitsandbytes", lambda: None)
    with pytest.raises(ConfigError, match=r"nf4 cannot run on cpu.*not installed.*pip install"):
        kernels_for("nf4", "cpu")
    reports = {report.name: report for report in survey("cpu")}
    assert "not installed" in reports["bitsandbytes"].missing


def test_a_library_for_a_gpu_is_not_taken_for_an_old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(functional=SimpleNamespace(has_avx512bf16=lambda: False))
    monkeypatch.setattr(module.four_bit, "bitsandbytes", lambda: loaded)
    for flags, reason in (
        ({"avx512f", "avx512_bf16"}, "its library for a GPU"),
        ({"avx512f"}, "no AVX-512 bfloat16"),
    ):
        monkeypatch.setattr(module.four_bit, "cpu_flags", lambda found=flags: frozenset(found))
        assert reason in module.four_bit.BitsAndBytes().missing()


def test_a_device_without_the_precision_names_those_that_it_has() -> None:
    with pytest.raises(ConfigError, match=r"int8 cannot run on mps.*float32, bfloat16, float16"):
        kernels_for("int8", "mps")


def test_every_precision_has_its_kernels_listed() -> None:
    listed = {name for report in survey("cpu") for name in report.precisions}
    assert listed == set(PRECISIONS)
    assert survey("mps")[0].name == Torch("mps").name


def test_a_bias_is_added_after_the_product() -> None:
    weight = quantise([torch.zeros(8, 64)], (8, 64), "float32")
    bias = torch.arange(8.0)
    packed = Torch("cpu").pack(weight, torch.float32, CPU)
    layer = KernelLinear((8, 64), packed, "torch", bias)
    assert torch.equal(layer(torch.ones(2, 3, 64)), bias.expand(2, 3, 8))
    assert layer.nbytes == 8 * 64 * 4 + 8 * 4
