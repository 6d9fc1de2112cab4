"""Reading one stage's tensors from safetensors files: only their bytes, once, into place.

Memory-mapping counts a page twice while it is copied; ``readinto`` does not, so memory peaks at
the size of the shard. A dtype conversion goes through a small buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from flowspec.errors import ModelError
from flowspec.model.weights import gguf_rows
from flowspec.model.weights.tensor_files import TensorEntry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: Types of quantised weights in a shard.
_CODES = {"U8": torch.uint8, "I8": torch.int8, "F32": torch.float32}
_CODES |= {"BF16": torch.bfloat16, "F16": torch.float16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}
#: Bytes converted at a time.
_BUFFER = 8 << 20
#: Weights of a matrix read and quantised at a time.
_SLICE = 1 << 20


def check_shape(stored: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """ModelError if the tensor ``stored`` has not the ``shape`` that the config says."""
    if found != shape:
        raise ModelError(f"{stored} has shape {found}; the config says {shape}")


def read_tensor(name: str, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of ``entry`` as ``dtype``.

    ModelError if its bytes do not match the header, or a value is not finite.
    """
    if entry.packed:
        whole = torch.empty((math.prod(entry.shape[:-1]), entry.shape[-1]), dtype=dtype)
        at = 0
        for rows in _unpacked(name, entry, range(whole.shape[0])):
            whole[at : at + len(rows)] = rows
            at += len(rows)
        return whole.view(entry.shape)
    stored = _stored_type(name, entry)
    count = math.prod(entry.shape)
    result = torch.empty(count, dtype=dtype)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        if stored == dtype:
            _read_exactly(file, result, name)
            _check_finite(result, name)
        else:
            buffer = torch.empty(min(count, _BUFFER // stored.itemsize), dtype=stored)
            for at in range(0, count, max(1, buffer.numel())):
                part = buffer[: count - at]
                _read_exactly(file, part, name)
                _check_finite(part, name)
                result[at : at + part.numel()] = part
    return result.view(entry.shape)


def read_rows(name: str, entry: TensorEntry, rows: range | None = None) -> Iterator[torch.Tensor]:
    """``rows`` of the matrix of ``entry`` (None: all) in slices, in the stored type.

    Errors as above.
    """
    wanted = range(entry.shape[0]) if rows is None else rows
    if entry.packed:
        yield from _unpacked(name, entry, wanted)
        return
    stored = _stored_type(name, entry)
    columns = entry.shape[1]
    step = max(1, _SLICE // columns)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start + wanted.start * columns * stored.itemsize)
        for at in range(wanted.start, wanted.stop, step):
            part = torch.empty((min(step, wanted.stop - at), columns), dtype=stored)
            _read_exactly(file, part.view(-1), name)
            _check_finite(part, name)
            yield part


def _unpacked(name: str, entry: TensorEntry, rows: range) -> Iterator[torch.Tensor]:
    """``rows`` of a tensor of a GGUF file in slices, float32; errors as above."""
    step = max(1, _SLICE // entry.shape[-1])
    for at in range(rows.start, rows.stop, step):
        part = torch.from_numpy(gguf_rows.read_rows(entry, range(at, min(at + step, rows.stop))))
        part = part.view(-1, entry.shape[-1])
        _check_finite(part, name)
        yield part


def read_blocks(name: str, entry: TensorEntry, rows: range) -> list[torch.Tensor]:
    """``rows`` of a matrix of a GGUF file in four bits: codes and scales; errors as above."""
    inputs = entry.shape[1]
    codes = torch.empty((len(rows), inputs // 2), dtype=torch.uint8)
    scales = torch.empty((len(rows), inputs // 16), dtype=torch.float16)
    step = max(1, _SLICE // inputs)
    for at in range(0, len(rows), step):
        found = gguf_rows.read_blocks(entry, rows[at : at + step])
        for tensor, part in zip((codes, scales), found, strict=True):
            tensor[at : at + step] = torch.from_numpy(part)
    _check_finite(scales, name)
    return [codes, scales]


def read_codes(name: str, entry: TensorEntry, rows: range) -> torch.Tensor:
    """``rows`` of a matrix of codes or scales as they are stored; errors as above."""
    stored = _stored_type(name, entry, _CODES)
    columns = entry.shape[1]
    result = torch.empty((len(rows), columns), dtype=stored)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start + rows.start * columns * stored.itemsize)
        _read_exactly(file, result.view(-1), name)
    _check_finite(result, name)
    return result


def read_integers(name: str, entry: TensorEntry) -> torch.Tensor:
    """The tensor of ``entry`` as int64 if its elements are whole numbers; errors as above."""
    stored = _stored_type(name, entry, _INTEGERS)
    result = torch.empty(entry.shape, dtype=stored)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        _read_exactly(file, result.view(-1), name)
    return result.long()


def read_bytes(name: str, entry: TensorEntry) -> torch.Tensor:
    """The tensor of ``entry`` if its elements are bytes; errors as above."""
    _stored_type(name, entry, {"U8": torch.uint8})
    result = torch.empty(entry.shape, dtype=torch.uint8)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        _read_exactly(file, result.view(-1), name)
    return result


def _stored_type(
    name: str, entry: TensorEntry, types: Mapping[str, torch.dtype] = _DTYPES
) -> torch.dtype:
    """The type of the stored tensor; ModelError if it is not in ``types``, or bytes are missing."""
    stored = types.get(entry.dtype)
    if stored is None:
        raise ModelError(
            f"tensor {name} has type {entry.dtype}; expected one of {', '.join(types)}"
        )
    count = math.prod(entry.shape)
    if count * stored.itemsize != entry.end - entry.start:
        raise ModelError(
            f"tensor {name} in {entry.file} has {entry.end - entry.start} bytes for shape "
            f"{entry.shape}"
        )
    return stored


def _check_finite(values: torch.Tensor, name: str) -> None:
    """ModelError if one of ``values``, just read, is NaN or infinite."""
    if not values.is_floating_point():
        return
    # A sum is several times as fast as a look at each value, and neither is lost in it.
    wide = torch.promote_types(values.dtype, torch.float32)
    for part in torch.split(values.view(-1), _SLICE):  # a sum in another type takes a copy
        if not math.isfinite(part.sum(dtype=wide).item()):
            raise ModelError(
                f"tensor {name} has values that are NaN or infinite: the file is damaged; "
                "download the model again"
            )


def _read_exactly(file: object, into: torch.Tensor, name: str) -> None:
    view = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise ModelError(
                f"the weights file of tensor {name} ends inside it; download the model again"
            )
        view = view[got:]
