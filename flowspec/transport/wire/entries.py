"""Stream entries as they are on the wire, read field by field; WireError for a malformed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Envelope
from flowspec.core.run.key import RunKey, may_be_id
from flowspec.errors import WireError
from flowspec.transport.wire import codec

Fields = Mapping[bytes, bytes]

#: Most names and values in an entry: of messages of as many runs as travel together, with rows.
MOST_FIELDS = 4096
#: Most of them that all messages of an entry have.
_MOST_SHARED = 16


def fields(flat: Sequence[bytes]) -> Fields:
    """An entry's names and values, which the server sends in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def parts(flat: Sequence[bytes]) -> list[Fields]:
    """The messages in an entry, each with the fields that all have: a ``q`` begins a message.

    WireError if there are more than any worker sends.
    """
    if len(flat) > MOST_FIELDS:
        raise WireError(f"an entry of {len(flat) // 2} fields; at most {MOST_FIELDS // 2} fit")
    begins = [at for at in range(0, len(flat), 2) if flat[at] == b"q"]
    if len(begins) < 2:
        return [fields(flat)]
    if begins[0] > _MOST_SHARED:
        raise WireError(f"{begins[0] // 2} fields before an entry's messages")
    shared = fields(flat[: begins[0]])
    spans = zip(begins, [*begins[1:], len(flat)], strict=True)
    return [{**shared, **fields(flat[first:end])} for first, end in spans]


def envelope(entry: Fields, bundle: int = 0) -> Envelope:
    """The envelope in ``entry``: ``f`` its sender, ``q`` its number, ``m`` its message.

    ``bundle``: as in ``Envelope``.
    """
    sender = Address.parse(text(entry, b"f"))
    return Envelope(sender, number(entry, b"q"), codec.decode(field(entry, b"m")), bundle)


def rows(entry: Fields) -> tuple[RunKey, int, bytes]:
    """Run, segment and payload of an entry with rows: ``j``, ``e``, ``s``, and its payload's."""
    run = RunKey(text(entry, b"j"), number(entry, b"e"))
    if not may_be_id(run.job):
        raise WireError(f"rows of a job whose name has {len(run.job)} characters")
    return run, number(entry, b"s"), payload(entry)


def payload_fields(data: bytes) -> list[bytes | str | int]:
    """Names and values that carry rows: ``d`` the array, ``c`` its checksum."""
    return ["d", data, "c", codec.checksum(data)]


def payload(entry: Fields) -> bytes:
    """The array of rows in ``entry``; WireError if it is not what was sent."""
    data = field(entry, b"d")
    if codec.checksum(data) != number(entry, b"c"):
        raise WireError("rows whose checksum is not theirs: they were changed on the way")
    return data


def field(entry: Fields, name: bytes) -> bytes:
    value = entry.get(name)
    if value is None:
        raise WireError(f"an entry without field {name.decode()}")
    return value


def text(entry: Fields, name: bytes) -> str:
    try:
        return field(entry, name).decode()
    except UnicodeDecodeError:
        raise WireError(f"field {name.decode()} is not text") from None


def number(entry: Fields, name: bytes) -> int:
    found = text(entry, name)
    if not found.isascii() or not found.isdigit() or len(found) > 18:
        raise WireError(f"field {name.decode()} is not a number")
    return int(found)


def order(entry: str) -> tuple[int, int]:
    """An entry's id as numbers, which sort as entries do."""
    milliseconds, _, count = entry.partition("-")
    return int(milliseconds), int(count)


def after(entry: str) -> str:
    """The smallest id behind ``entry``."""
    milliseconds, count = order(entry)
    return f"{milliseconds}-{count + 1}"


def taken(found: Sequence[Any], cursors: dict[str, str]) -> list[tuple[str, Sequence[Any]]]:
    """The answer to ``xread`` as (stream, entries); ``cursors`` are moved behind them."""
    read = []
    for stream, arrived in found:
        name = stream.decode()
        cursors[name] = arrived[-1][0].decode()
        read.append((name, arrived))
    return read


def xread(streams: Mapping[str, str], block_seconds: float, most: int) -> tuple[Any, ...]:
    """The command that reads at most ``most`` entries a stream behind the cursors ``streams``."""
    block = ("BLOCK", int(block_seconds * 1000)) if block_seconds >= 0.001 else ()
    return ("XREAD", "COUNT", most, *block, "STREAMS", *streams, *streams.values())
