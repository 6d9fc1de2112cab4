"""Rows of the tensors in GGUF files: as numbers, or as the codes that a precision keeps."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from flowspec.errors import ModelError, naming_what_is_missing
from flowspec.model.weights.tensor_files import TensorEntry

#: Types whose codes a precision keeps: numbers, or blocks of 32 with its scale, or with a minimum.
CODES_OF = {
    "int4": {"Q4_0", "Q4_1", "Q4_K"},
    "int8-block": {"Q8_0"},
    "bfloat16": {"BF16"},
    "float16": {"F16"},
}
DAMAGED = "download it again"

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T", np.float32, np.uint8)


def read_rows(entry: TensorEntry, rows: range) -> Floats:
    """``rows`` of a matrix, or all of a vector, as numbers; ModelError if the file ends."""
    with naming_what_is_missing():
        from gguf import GGMLQuantizationType, dequantize
    kind = GGMLQuantizationType[entry.dtype]
    if len(entry.shape) == 1:
        found: Floats = dequantize(_in_order(entry, range(1)), kind)[0]
        return _halves(found, entry.heads) if entry.heads else found + np.float32(entry.add)
    numbers: Floats = dequantize(_bytes_of(entry, rows), kind)
    return numbers


def has_codes(entry: TensorEntry) -> bool:
    """Whether ``read_blocks`` reads it."""
    return entry.dtype in CODES_OF["int4"] and len(entry.shape) == 2


def read_blocks(entry: TensorEntry, rows: range) -> tuple[Bytes, Halves]:
    """``rows`` of a matrix in blocks of four bits as ``Weight`` has them, from zero.

    Exactly those of the file, but the scales and minima of Q4_K, which are products.
    """
    with naming_what_is_missing():
        from gguf.quants import Q4_K
    stored = _bytes_of(entry, rows)
    if entry.dtype == "Q4_K":
        blocks = stored.reshape(len(rows), -1, 144)
        factors = blocks[..., :4].copy().view(np.float16).astype(np.float32)
        counts = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
        scales, minima = (
            (factors[..., at, None] * part.reshape(*blocks.shape[:2], 8)).astype(np.float16)
            for at, part in enumerate(counts)
        )
        both = scales, -minima
        pairs = blocks[..., 16:].reshape(len(rows), -1, 32)
    else:
        head = 2 if entry.dtype == "Q4_0" else 4
        blocks = stored.reshape(len(rows), -1, head + 16)
        facts = blocks[..., :head].copy().view(np.float16)
        scales = facts[..., 0]
        both = scales, facts[..., 1] if head == 4 else -8 * scales
        pairs = blocks[..., head:]
    # Of each run of bytes the low bits come first, and then the high ones.
    halves = [pairs & np.uint8(15), pairs >> np.uint8(4)]
    codes = np.concatenate(halves, axis=-1).reshape(len(rows), -1, 2)
    packed: Bytes = codes[..., 0] << np.uint8(4) | codes[..., 1]
    return packed, np.concatenate([part.reshape(len(rows), -1) for part in both], axis=-1)


def _bytes_of(entry: TensorEntry, rows: range) -> Bytes:
    """The bytes of ``rows`` of a matrix, ``[rows, bytes]``, in the library's order of rows."""
    if not entry.heads:
        return _in_order(entry, rows)
    size = entry.shape[0] // entry.heads
    whole = range(rows.start // size * size, -(-rows.stop // size) * size)
    found = _halves(_in_order(entry, whole), len(whole) // size)
    return found[rows.start - whole.start : rows.stop - whole.start]


def _halves(found: npt.NDArray[T], heads: int) -> npt.NDArray[T]:
    """The rows of ``heads`` heads, whose two halves are interleaved, one half behind the other."""
    pairs = found.reshape(heads, -1, 2, *found.shape[1:])
    return pairs.swapaxes(1, 2).reshape(found.shape)


def _in_order(entry: TensorEntry, rows: range) -> Bytes:
    """The bytes of ``rows`` as they lie in the file; a vector is one row."""
    count = 1 if len(entry.shape) == 1 else entry.shape[0]
    size, rest = divmod(entry.end - entry.start, count)
    if rest:
        raise ModelError(f"{entry.file} has a tensor of {count} uneven rows; {DAMAGED}")
    data = np.empty((len(rows), size), np.uint8)
    with entry.file.open("rb") as file:
        file.seek(entry.start + rows.start * size)
        if file.readinto(data.view("B")) < data.nbytes:  # type: ignore[arg-type]
            raise ModelError(f"{entry.file} is cut short; {DAMAGED}")
    return data
