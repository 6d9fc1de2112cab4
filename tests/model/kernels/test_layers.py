"""Norms and activations in C: those of torch but for rounding, each row and number by itself."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from flowspec.errors import ModelError
from flowspec.model.kernels.attention import library_for
from flowspec.model.kernels.layers import CompiledNorm, CompiledSilu

TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = library_for(16, torch.bfloat16, torch.device("cpu"))
    if found is None:
        pytest.skip("this machine cannot compile it")
    return found


def norm_of(library: ctypes.CDLL, width: int, dtype: torch.dtype) -> CompiledNorm:
    norm = LlamaRMSNorm(width, eps=1e-5)
    source = torch.Generator().manual_seed(width)
    norm.weight = torch.nn.Parameter(torch.randn(width, generator=source).to(dtype))
    return CompiledNorm(library, norm)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 20, 576])
@torch.inference_mode()
def test_a_norm_is_the_librarys(library: ctypes.CDLL, width: int, dtype: torch.dtype) -> None:
    ours = norm_of(library, width, dtype)
    rows = (torch.randn((2, 5, width)) * torch.logspace(-6, 6, 5)[:, None]).to(dtype)
    wide = rows.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * ours.weight.double()
    found = ours(rows)
    assert found.dtype == dtype
    roundings = 3 * torch.finfo(dtype).eps / 2  # of the scale, and of two products
    torch.testing.assert_close(found.double(), wanted, rtol=roundings, atol=1e-30)
    assert torch.equal(ours(rows[1:, 3]), found[1:, 3])


@torch.inference_mode()
def test_a_norm_of_what_is_no_number_is_none(library: ctypes.CDLL) -> None:
    ours = norm_of(library, 16, torch.bfloat16)
    rows = torch.ones((3, 16), dtype=torch.bfloat16)
    rows[1, 4] = torch.nan
    assert ours(rows).isnan().any(-1).tolist() == [False, True, False]


def test_rows_of_another_type_or_width_are_refused(library: ctypes.CDLL) -> None:
    ours = norm_of(library, 16, torch.bfloat16)
    for rows in (torch.ones(2, 16), torch.ones((2, 8), dtype=torch.bfloat16)):
        with pytest.raises(ModelError, match="a norm of rows of"):
            ours(rows)
    with pytest.raises(ModelError, match=r"an activation of torch.float64"):
        CompiledSilu(library)(torch.ones(4).double())


@pytest.mark.parametrize("dtype", TYPES)
def test_an_activation_is_torchs(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    ours = CompiledSilu(library)
    gates = torch.cat((torch.linspace(-120, 120, 4099), torch.randn(1000), torch.zeros(2)))
    gates = gates.to(dtype)
    wanted = torch.nn.functional.silu(gates.double())
    found = ours(gates)
    # Roundings of the exponential, the sum, the quotient, the product; next to nothing is 0.
    roundings = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=roundings, atol=87 * math.exp(-87))
    assert torch.equal(ours(gates[17:20]), found[17:20])
    assert torch.equal(ours(gates[:4098].view(2, -1).t()), found[:4098].view(2, -1).t())


def test_an_activation_at_the_ends_of_the_numbers(library: ctypes.CDLL) -> None:
    gates = torch.tensor([torch.inf, -1e30, 1e30, torch.nan, -0.0])
    found = CompiledSilu(library)(gates)
    assert found[:3].tolist() == [torch.inf, 0, gates[2].item()]
    assert found[3].isnan()
    assert found[4] == 0
