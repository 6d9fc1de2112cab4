"""Messages and rows as bytes. Input is checked before anything is built from it.

Envelopes are msgpack: ``[version, kind, field, ...]``, dataclasses as lists of their fields in
order. Rows are written in msgpack-numpy's published layout, so that any client with that package
can read them. They are read by the strict decoder here: the package's own decoder unpickles and is
never called.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import MESSAGES, MOST_REASON, Answer, Fault, Message, Submit
from flowspec.core.protocol.row_types import BFLOAT16
from flowspec.core.run.key import MAX_ID_BYTES, RunKey, may_be_id
from flowspec.core.run.spec import MAX_MESSAGES_BYTES
from flowspec.errors import FlowSpecError, WireError
from flowspec.transport.wire.declared import Bounds, check_declared

#: Version of the wire format; a reader refuses any other.
VERSION = 9
#: Largest envelope accepted, bytes; of a ``Submit``, which holds its job's prompt, ``MAX_SUBMIT``.
MAX_ENVELOPE = 1 << 20
MAX_SUBMIT = 16 << 20
#: Largest payload of rows accepted, bytes.
MAX_ROWS = 256 << 20
#: Element types rows may have, as numpy writes them; bfloat16 is a record with its own tag.
ROW_DTYPES = frozenset({"<f4", "<f2", "<f8", "<u8", "|b1"})
_MAX_DIMENSIONS = 4
_BFLOAT16_NAME = [["bfloat16", "<u2"]]
#: Largest integer a field may hold; ids, positions and counts all fit.
_MAX_INT = (1 << 63) - 1

Checker = Callable[[Any], Any]

_KINDS: dict[type, int] = {kind: number for number, kind in enumerate(MESSAGES)}
#: Bytes of a list of 16 parts or more before its length is given.
_WIDE_LIST = 0xDC
_PLAIN = Bounds(MAX_ENVELOPE, parts=1 << 13, text=MAX_ID_BYTES, lists=1 << 16, list_bytes=16)
#: Bounds of the kinds that need others. An answer has a list for each pair of ``top``, and what
#: earlier runs of a job have committed are often lists of one token.
_BOUNDS: dict[type, Bounds] = {
    Answer: replace(_PLAIN, list_bytes=7),
    Fault: replace(_PLAIN, text=4 * MOST_REASON),
    Submit: Bounds(MAX_SUBMIT, parts=3 << 18, text=MAX_MESSAGES_BYTES, lists=1 << 17, list_bytes=2),
}


def encode(message: Message) -> bytes:
    """``message`` as bytes; WireError if it is not a message, or larger than a reader accepts."""
    names = _field_names(type(message))
    fields = [getattr(message, name) for name in names]
    try:
        packed: bytes = msgpack.packb([VERSION, _KINDS[type(message)], *fields], default=_as_list)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"a {type(message).__name__} cannot travel: {error}") from None
    most = _BOUNDS.get(type(message), _PLAIN).size
    if len(packed) > most:
        raise WireError(
            f"a {type(message).__name__} of {len(packed)} bytes cannot travel; at most "
            f"{most} are accepted"
        )
    return packed


def decode(data: bytes) -> Message:
    """The message in ``data``; WireError unless it is exactly one, well-formed, of this version.

    What it declares is checked against its kind's bounds before anything is built from it.
    """
    kind = _kind_of(data)
    bounds = _BOUNDS.get(kind, _PLAIN)
    if len(data) > bounds.size:
        raise WireError(f"envelope of {len(data)} bytes; at most {bounds.size} are accepted")
    check_declared(data, bounds)
    try:
        parts = msgpack.unpackb(
            data, raw=False, use_list=False, max_ext_len=0, max_map_len=0, max_bin_len=0
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"envelope is not msgpack: {type(error).__name__}") from None
    message: Message = _checker(kind)(parts[2:])
    return message


def _kind_of(data: bytes) -> type[Message]:
    """The kind of the message in ``data``, of which only the first bytes are looked at."""
    head = 3 if data[:1] == bytes([_WIDE_LIST]) else 1
    if len(data) < head + 2 or (head == 1 and data[0] & 0xF0 != 0x90) or data[head] != VERSION:
        raise WireError(f"envelope is not of version {VERSION}")
    number = data[head + 1]
    if number >= len(MESSAGES):
        raise WireError(f"envelope has unknown kind {number}")
    return MESSAGES[number]


def encode_rows(rows: npt.NDArray[Any]) -> bytes:
    """``rows`` in msgpack-numpy's layout; WireError for element types outside ROW_DTYPES."""
    if rows.dtype.str not in ROW_DTYPES and rows.dtype != BFLOAT16:
        raise WireError(
            f"rows of type {rows.dtype.str} cannot travel; expected one of {sorted(ROW_DTYPES)}"
        )
    packed: bytes = msgpack.packb(np.ascontiguousarray(rows), default=msgpack_numpy.encode)
    return packed


def checksum(data: bytes) -> int:
    """What is sent beside rows: they have no other redundancy, and any bits are numbers."""
    return zlib.crc32(data)


def decode_rows(data: bytes) -> npt.NDArray[Any]:
    """The array in ``data``, as a read-only view; WireError if it is not an array of numbers.

    Size, element type and shape are checked against each other before an array is made.
    """
    if len(data) > MAX_ROWS:
        raise WireError(f"rows of {len(data)} bytes; at most {MAX_ROWS} are accepted")
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_map_len=8,
            max_array_len=_MAX_DIMENSIONS,
            max_str_len=16,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"rows are not msgpack: {type(error).__name__}") from None
    if not isinstance(found, dict) or found.keys() != {b"nd", b"type", b"kind", b"shape", b"data"}:
        raise WireError("rows are not in msgpack-numpy's array layout")
    dtype = _row_type(found[b"kind"], found[b"type"])
    shape = found[b"shape"]
    raw = found[b"data"]
    if found[b"nd"] is not True:
        raise WireError("rows of type number; expected an array")
    if not isinstance(shape, list) or not all(
        type(extent) is int and 0 <= extent <= MAX_ROWS for extent in shape
    ):
        raise WireError("rows have a shape that is no list of sizes")
    if not isinstance(raw, bytes) or math.prod(shape) * dtype.itemsize != len(raw):
        raise WireError(f"rows of shape {shape} and type {dtype} do not fill their bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _row_type(kind: Any, name: Any) -> np.dtype[Any]:
    """The element type of rows that msgpack-numpy calls ``name``; WireError for any other."""
    if kind == b"" and isinstance(name, str) and name in ROW_DTYPES:
        return np.dtype(name)
    if kind == b"V" and name == _BFLOAT16_NAME:
        return BFLOAT16
    raise WireError(f"rows of type {str(name)[:20]!r}; expected one of {sorted(ROW_DTYPES)}")


# ---- checkers, one per field type, built once ----------------------------------------------------


def _field_names(kind: type) -> tuple[str, ...]:
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return names


def _as_list(value: object) -> list[object]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} cannot travel in an envelope")
    return [getattr(value, name) for name in _field_names(type(value))]


def _checker(kind: Any) -> Checker:
    """A function that turns a msgpack value into ``kind`` or raises WireError."""
    known = _CHECKERS.get(kind)
    if known is not None:
        return known
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        checker = _dataclass_checker(kind)
        if kind is RunKey:
            checker = _run_checker(checker)
    elif typing.get_origin(kind) is tuple:
        checker = _tuple_checker(typing.get_args(kind))
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        checker = _optional_checker(typing.get_args(kind))
    else:
        raise TypeError(f"no wire form for {kind!r}")
    _CHECKERS[kind] = checker
    return checker


def _dataclass_checker(kind: type) -> Checker:
    hints = typing.get_type_hints(kind)
    checkers = [_checker(hints[name]) for name in _field_names(kind)]

    def check(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(checkers):
            raise WireError(f"{kind.__name__} does not have its {len(checkers)} fields")
        try:
            return kind(*[checker(part) for checker, part in zip(checkers, value, strict=True)])
        except WireError as error:
            raise WireError(f"{kind.__name__}: {error}") from None
        except FlowSpecError as error:
            raise WireError(f"{kind.__name__}: {error}") from None

    return check


def _run_checker(fields: Checker) -> Checker:
    """Of a run, whose job has a short name: names of keys are made from it."""

    def check(value: Any) -> RunKey:
        run: RunKey = fields(value)
        if not may_be_id(run.job):
            raise WireError(f"RunKey: an id of {len(run.job)} characters; {MAX_ID_BYTES} bytes fit")
        return run

    return check


def _optional_checker(args: tuple[Any, ...]) -> Checker:
    """Of a value that may be None."""
    (kind,) = [arg for arg in args if arg is not types.NoneType]
    checker = _checker(kind)
    return lambda value: None if value is None else checker(value)


def _tuple_checker(args: tuple[Any, ...]) -> Checker:
    if args == (int, ...):
        return _check_ints
    if len(args) == 2 and args[1] is ...:
        item = _checker(args[0])
        return lambda value: _kept(value, [item(part) for part in _check_list(value)])
    items = [_checker(arg) for arg in args]

    def check(value: Any) -> Any:
        if len(_check_list(value)) != len(items):
            raise WireError(f"a group of {len(items)} has {len(value)} parts")
        return _kept(value, [item(part) for item, part in zip(items, value, strict=True)])

    return check


def _kept(value: tuple[Any, ...], checked: Sequence[Any]) -> tuple[Any, ...]:
    """``checked`` as a tuple: ``value`` itself if no part changed, so that none is held twice."""
    return value if all(map(operator.is_, value, checked)) else tuple(checked)


def _check_list(value: Any) -> tuple[Any, ...]:
    if type(value) is not tuple:
        raise WireError(f"expected a list, got {type(value).__name__}")
    return value


def _check_ints(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not set(map(type, value)) <= {int}:
        raise WireError("expected a list of integers")
    if value and (min(value) < -1 or max(value) > _MAX_INT):
        raise WireError("an integer is out of range")
    return value


def _check_int(value: Any) -> int:
    if type(value) is not int or not -1 <= value <= _MAX_INT:
        raise WireError("expected an integer")
    return value


def _check_float(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise WireError("expected a finite number")
    return float(value)


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise WireError("expected true or false")
    return value


def _check_str(value: Any) -> str:
    if type(value) is not str:
        raise WireError("expected text")
    return value


_NAMES: dict[type, tuple[str, ...]] = {}
_CHECKERS: dict[Any, Checker] = {
    int: _check_int,
    float: _check_float,
    bool: _check_bool,
    str: _check_str,
}
