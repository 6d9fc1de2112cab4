"""What an envelope declares, walked through before anything is built from it.

A few bytes may declare a lot: a list of a million parts, lists within lists, a million empty ones.
Every part takes a byte at least, so an envelope that declares more parts than it has bytes is
refused, and each list and text has to be paid for by a number of bytes. Runs of numbers are skipped
by one regular expression, so the walk has about as many turns as the envelope has lists and texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowspec.errors import WireError

#: Lists and texts that an envelope may have whatever its size.
_FREE = 256
#: Bytes that pay for one text more.
_TEXT_BYTES = 32
#: Numbers of fields: integers from -1, floats, true, false and none. Other negative ones are in no
#: message, and would cost forty times their bytes.
_SCALARS = re.compile(
    rb"(?:[\x00-\x7f\xc0\xc2\xc3\xff]++|\xcc.|\xcd..|[\xca\xce].{4}|[\xcb\xcf].{8})*+", re.DOTALL
)
#: Bytes that follow a header and hold the length that it declares.
_LENGTH_BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4}
_LISTS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
_NEGATIVE = frozenset({*range(0xD0, 0xD4), *range(0xE0, 0xFF)})
_TEXTS = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Most that an envelope of one kind may have.

    ``size``: bytes. ``parts``: of one list. ``text``: bytes of one text. ``lists``: of them in all,
    each of which has to be paid for by ``list_bytes`` bytes of the envelope.
    """

    size: int
    parts: int
    text: int
    lists: int
    list_bytes: int


def check_declared(data: bytes, bounds: Bounds) -> None:
    """WireError if ``data`` declares more than ``bounds`` allow, or is no msgpack of messages."""
    at, end = 0, len(data)
    declared = lists = texts = 0
    most_lists = min(bounds.lists, _FREE + end // bounds.list_bytes)
    most_texts = _FREE + end // _TEXT_BYTES
    while at < end:
        found = _SCALARS.match(data, at)
        assert found is not None  # it matches the empty text
        at = found.end()
        if at == end:
            break
        head = data[at]
        length, at = _length(data, at)
        if head in _LISTS:
            lists += 1
            declared += length
            if length > bounds.parts or declared > end:
                raise WireError(f"an envelope of {end} bytes declares a list of {length} parts")
        elif head in _TEXTS:
            texts += 1
            at += length
            if length > bounds.text:
                raise WireError(f"a text of {length} bytes; at most {bounds.text} are accepted")
        elif head in _NEGATIVE:
            raise WireError("an integer is out of range")
        else:
            raise WireError(f"envelope is not msgpack of messages: it has a byte {head:#04x}")
        if lists > most_lists or texts > most_texts:
            raise WireError(f"an envelope of {end} bytes has too many lists or texts")


def _length(data: bytes, at: int) -> tuple[int, int]:
    """The length that the header at ``at`` declares, and where what follows the header begins."""
    head = data[at]
    wide = _LENGTH_BYTES.get(head)
    if wide is not None:
        return int.from_bytes(data[at + 1 : at + 1 + wide], "big"), at + 1 + wide
    return head & (0x0F if head < 0xA0 else 0x1F), at + 1
