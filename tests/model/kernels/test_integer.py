"""The products in C: sums of integers, of any rows."""

from __future__ import annotations

import pytest
import torch

from flowspec.errors import ModelError
from flowspec.model.kernels.base import Packed
from flowspec.model.kernels.integer import Integer
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, dequantise, quantise

CPU = torch.device("cpu")


@pytest.fixture(params=["int4", "int8", "int8-block"])
def kernel(request: pytest.FixtureRequest) -> Integer:
    found = Integer(PRECISIONS[request.param].bits)
    found.precisions = (request.param,)
    if found.missing():
        pytest.skip(found.missing())
    return found


def packed(kernel: Integer, values: torch.Tensor) -> tuple[Packed, Weight]:
    weight = quantise([values], (values.shape[0], values.shape[1]), kernel.precisions[0])
    return kernel.pack(weight, torch.float32, CPU), weight


@pytest.mark.parametrize("inputs", [32, 64, 96, 192, 576, 8256])
def test_products_are_exact_but_for_the_rounding_of_rows(kernel: Integer, inputs: int) -> None:
    if not kernel.takes(37, inputs):
        pytest.skip("the kernel does not take this shape")
    source = torch.Generator().manual_seed(inputs)
    held, weight = packed(kernel, torch.randn((37, inputs), generator=source))
    rows = torch.randint(-32767, 32768, (9, inputs), generator=source).float()
    rows[:, ::32] = rows[:, ::32].sign() * 32767  # so that a block's codes are its values
    wanted = rows.double() @ dequantise(weight, torch.float64).t()
    error = (held.multiply(rows).double() - wanted).norm() / wanted.norm()
    assert error < 1e-6


def test_an_input_that_outweighs_all_others_takes_nothing_from_other_blocks(
    kernel: Integer,
) -> None:
    """As the first token of SmolLM2 has: with one scale for the row, little of the rest is left."""
    source = torch.Generator().manual_seed(1)
    values = torch.randn((48, 256), generator=source)
    values[:, :32] = 0
    held, weight = packed(kernel, values)
    rows = torch.randn((3, 256), generator=source)
    rows[:, 7] = torch.tensor([1e5, -3e6, 1e7])
    wanted = rows.double()[:, 32:] @ dequantise(weight, torch.float64).t()[32:]
    assert (held.multiply(rows).double() - wanted).norm() / wanted.norm() < 1e-4


def test_the_largest_sums_fit(kernel: Integer) -> None:
    held, weight = packed(kernel, torch.full((3, 16384), 7.0))
    rows = torch.full((5, 16384), -1.0)
    wanted = rows.double() @ dequantise(weight, torch.float64).t()
    torch.testing.assert_close(held.multiply(rows).double(), wanted, rtol=1e-6, atol=0)


def test_bfloat16_rows_give_the_nearest_bfloat16(kernel: Integer) -> None:
    held, _ = packed(kernel, torch.randn((64, 128)))
    rows = torch.randn((6, 128)).bfloat16()
    found = held.multiply(rows)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, held.multiply(rows.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(
    kernel: Integer, bad: float, dtype: torch.dtype
) -> None:
    held, _ = packed(kernel, torch.randn((32, 64)))
    rows = torch.randn((5, 64)).to(dtype)
    wanted = held.multiply(rows)
    rows[3, 17] = bad
    found = held.multiply(rows)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4]
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-39, 1e30])
def test_rows_of_any_size(kernel: Integer, size: float) -> None:
    held, weight = packed(kernel, torch.randn((32, 64)))
    rows = torch.randn((4, 64)) * size
    wanted = rows.double() @ dequantise(weight, torch.float64).t()
    assert (
        (held.multiply(rows).double() - wanted).abs() <= 1e-3 * wanted.abs().max() + 1e-37
    ).all()


def test_threads_change_no_bit(kernel: Integer) -> None:
    held, _ = packed(kernel, torch.randn((515, 256)))
    rows = torch.randn((7, 256))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = held.multiply(rows)
        torch.set_num_threads(3)
        assert torch.equal(held.multiply(rows), alone)
    finally:
        torch.set_num_threads(before)


def test_rows_of_another_type_or_width_are_refused(kernel: Integer) -> None:
    held, _ = packed(kernel, torch.randn((32, 64)))
    with pytest.raises(ModelError, match=r"rows of torch.float64, 64 wide; 64 expected"):
        held.multiply(torch.randn((2, 64)).double())
    with pytest.raises(ModelError, match="128 wide; 64 expected"):
        held.multiply(torch.randn((2, 128)))


def test_rows_need_not_lie_side_by_side(kernel: Integer) -> None:
    held, _ = packed(kernel, torch.randn((32, 64)))
    rows = torch.randn((64, 5)).t()
    assert torch.equal(held.multiply(rows), held.multiply(rows.contiguous()))


def test_inputs_that_do_not_come_out_even_are_not_taken() -> None:
    assert Integer(4).takes(7, 96)
    assert not Integer(4).takes(7, 48)
    assert not Integer(8).takes(7, 80)
