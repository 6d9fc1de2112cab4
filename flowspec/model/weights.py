"""Reading one stage's tensors from safetensors files: only their bytes, once, into place.

Memory-mapping counts a page twice while it is copied; ``readinto`` does not, so memory peaks at
the size of the shard. A dtype conversion goes through a small buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from flowspec.errors import ModelError
from flowspec.model.directory import TensorEntry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Bytes converted at a time.
_BUFFER = 8 << 20
#: Weights of a matrix read and quantised at a time.
_SLICE = 1 << 20


def read_tensor(name: str, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of ``entry`` as ``dtype``; ModelError if its bytes do not match the header."""
    stored = _stored_type(name, entry)
    count = math.prod(entry.shape)
    result = torch.empty(count, dtype=dtype)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        if stored == dtype:
            _read_exactly(file, result, name)
        else:
            buffer = torch.empty(min(count, _BUFFER // stored.itemsize), dtype=stored)
            for at in range(0, count, max(1, buffer.numel())):
                part = buffer[: count - at]
                _read_exactly(file, part, name)
                result[at : at + part.numel()] = part
    return result.view(entry.shape)


def read_rows(name: str, entry: TensorEntry) -> Iterator[torch.Tensor]:
    """The matrix of ``entry`` in slices of whole rows, in the stored type; errors as above."""
    stored = _stored_type(name, entry)
    rows, columns = entry.shape
    step = max(1, _SLICE // columns)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for at in range(0, rows, step):
            part = torch.empty((min(step, rows - at), columns), dtype=stored)
            _read_exactly(file, part.view(-1), name)
            yield part


def read_bytes(name: str, entry: TensorEntry) -> torch.Tensor:
    """The tensor of ``entry`` if its elements are bytes; errors as above."""
    if entry.dtype != "U8" or math.prod(entry.shape) != entry.end - entry.start:
        raise ModelError(f"tensor {name} has type {entry.dtype}; expected bytes (U8)")
    result = torch.empty(entry.shape, dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        _read_exactly(file, result.view(-1), name)
    return result


def _stored_type(name: str, entry: TensorEntry) -> torch.dtype:
    """The type of the stored tensor; ModelError if it is no float type, or bytes are missing."""
    stored = _DTYPES.get(entry.dtype)
    if stored is None:
        raise ModelError(
            f"tensor {name} has type {entry.dtype}; expected one of {', '.join(_DTYPES)}"
        )
    count = math.prod(entry.shape)
    if count * stored.itemsize != entry.end - entry.start:
        raise ModelError(
            f"tensor {name} in {entry.file} has {entry.end - entry.start} bytes for shape "
            f"{entry.shape}"
        )
    return stored


def _read_exactly(file: object, into: torch.Tensor, name: str) -> None:
    view = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise ModelError(
                f"the weights file of tensor {name} ends inside it; download the model again"
            )
        view = view[got:]
