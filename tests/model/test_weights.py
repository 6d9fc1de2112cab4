from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flowspec.errors import ModelError
from flowspec.model.weights.tensor_files import TensorEntry, read_header
from flowspec.model.weights.tensors import read_rows, read_tensor


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_read_and_converted(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {"a": torch.randn(7, 5).to(stored), "b": torch.randn(1 << 19, 9).to(stored)}
    save_file(tensors, tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(
            read_tensor(name, read_header(tmp_path / "x.safetensors")[name], wanted),
            tensor.to(wanted),
        )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, stored: torch.dtype, value: float
) -> None:
    tensor = torch.full((64, 64), 100.0).to(stored)
    tensor[63, 40] = value
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["a"]
    for wanted in (stored, torch.float64):
        with pytest.raises(ModelError, match="tensor a has values that are NaN or infinite"):
            read_tensor("a", entry, wanted)
    with pytest.raises(ModelError, match="tensor a has values that are NaN or infinite"):
        list(read_rows("a", entry))
    tensor[63, 40] = -torch.finfo(stored).max
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    assert torch.equal(read_tensor("a", entry, stored), tensor)


def test_what_is_no_float_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match="type I64"):
        read_tensor("a", read_header(tmp_path / "x.safetensors")["a"], torch.float32)


def test_a_range_that_does_not_fit_the_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="8 bytes for shape"):
        read_tensor("a", TensorEntry(tmp_path / "x", 0, 8, "F32", (3,)), torch.float32)


def test_a_file_that_shrank_meanwhile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    with pytest.raises(ModelError, match="ends inside it"):
        read_tensor("a", TensorEntry(tmp_path / "x", 0, 8, "F32", (2,)), torch.float32)
