"""Quantised values: their errors, their bytes, and the same codes as bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.errors import ModelError
from flowspec.model.kernels.four_bit import bitsandbytes
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import dequantise, quantise, unpacked
from tests.marks import examples

QUANTISED = [name for name, precision in PRECISIONS.items() if precision.quantised]


def matrix(outputs: int = 96, inputs: int = 128, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn((outputs, inputs), generator=source) * 0.02


@pytest.mark.parametrize("name", PRECISIONS)
def test_slices_do_not_change_the_values(name: str) -> None:
    values = matrix()
    whole = quantise([values], (96, 128), name)
    sliced = quantise(values.split(7), (96, 128), name)
    assert len(whole.tensors) == len(sliced.tensors)
    assert all(map(torch.equal, whole.tensors, sliced.tensors))


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_bytes_are_those_that_plans_count_on(name: str) -> None:
    precision = PRECISIONS[name]
    weight = quantise([matrix()], (96, 128), name)
    in_memory = weight.nbytes
    if precision.double:
        in_memory = weight.codes.nbytes + weight.maxima.nbytes
    assert in_memory == precision.weight_bytes((96, 128))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("float32", 0),
        ("bfloat16", 3e-3),
        ("float16", 4e-4),
        ("int8", 1e-2),
        ("nf4", 0.1),
        ("nf4-double", 0.1),
    ],
)
def test_the_relative_error_is_that_of_the_format(name: str, most: float) -> None:
    values = matrix()
    found = dequantise(quantise([values], (96, 128), name), torch.float32)
    assert (found - values).norm() / values.norm() <= most


@given(st.sampled_from(QUANTISED), st.integers(0, 2**31), st.floats(1e-6, 1e4))
@settings(max_examples=examples(60), deadline=None)
def test_quantising_the_values_again_changes_nothing(name: str, seed: int, size: float) -> None:
    """The values are the nearest ones: a value that is representable stays."""
    once = dequantise(quantise([matrix(4, 64, seed) * size], (4, 64), name), torch.float32)
    twice = dequantise(quantise([once], (4, 64), name), torch.float32)
    assert (once - twice).abs().max() <= 0.01 * once.abs().max()


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_stay_zeros(name: str) -> None:
    weight = quantise([torch.zeros(4, 64)], (4, 64), name)
    assert not dequantise(weight, torch.float32).any()


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_4_bit_codes_are_those_of_bitsandbytes(name: str) -> None:
    package = bitsandbytes()
    assert package is not None
    values = matrix()
    ours = quantise([values], (96, 128), name)
    theirs, state = package.functional.quantize_4bit(values, blocksize=64, quant_type=name)
    assert torch.equal(ours.codes.view(-1), theirs.view(-1))
    assert ours.scales is not None
    assert torch.equal(ours.scales.view(-1), state.absmax.bfloat16())


@pytest.mark.parametrize("table", ["nf4", "fp4"])
@given(seed=st.integers(0, 2**31), size=st.floats(1e-6, 1e4))
@settings(max_examples=examples(40), deadline=None)
def test_double_quantised_maxima_have_eight_bits(table: str, seed: int, size: float) -> None:
    """The codes are those of single quantisation, the maxima within half a step of theirs."""
    values = matrix(32, 1024, seed) * size
    double = quantise([values], (32, 1024), f"{table}-double")
    single = quantise([values], (32, 1024), table)
    assert torch.equal(double.codes, single.codes)
    assert double.nbytes < single.nbytes
    exact = values.view(32, 16, 64).abs().amax(dim=-1)
    step = exact.amax(dim=-1, keepdim=True) / 255
    rounded = exact / 256  # bfloat16 has eight bits too
    assert ((double.maxima.float() - exact).abs() <= step * 0.51 + rounded).all()


def test_inputs_that_do_not_fill_a_block_are_refused() -> None:
    with pytest.raises(ModelError, match=r"100 inputs cannot be held in nf4.*use int8"):
        quantise([torch.zeros(4, 100)], (4, 100), "nf4")


@pytest.mark.parametrize("name", ["nf4", "fp4", "int4"])
def test_a_matrix_that_is_uneven_in_four_bits_has_eight(name: str) -> None:
    four = PRECISIONS[name]
    assert four.for_matrix((96, 128)) is four
    assert four.for_matrix((96, 344)).name == "int8"
    assert four.for_matrix((7, 64)).name == "int8"
    assert four.for_matrix((8, 96, 344)).name == "int8"  # experts
    assert four.weight_bytes((96, 344)) == PRECISIONS["int8"].weight_bytes((96, 344))
    assert PRECISIONS["int8"].for_matrix((7, 5)).name == "int8"


def test_the_first_code_of_a_byte_is_in_its_high_bits() -> None:
    assert unpacked(torch.tensor([[0x12, 0xAF]], dtype=torch.uint8)).tolist() == [[1, 2, 10, 15]]
