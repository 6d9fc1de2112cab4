"""Ids to text: what a tokenizer makes of them, token by token and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from flowspec.core.run.logprobs import TokenWritten

#: Least number of earlier ids decoded together with new ones, and how many may gather.
_WINDOW = 8
_MOST_IDS = 2 * _WINDOW
#: How many tokens a detokenizer remembers.
_MOST_WRITTEN = 1 << 18
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: How vocabularies that are no byte-level ones write a byte, and a space.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Detokenizer:
    """How ids of ``tokenizer``, one of the library's, are written, together and one by one.

    Texts of several tokens are not their joined decodings: a character's bytes may be spread over
    some of them, and decoding leaves out a first space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        marked = {token for token, one in added.items() if one.special}
        self._special = marked.union(tokenizer.all_special_ids)
        self._added = {token: str(one) for token, one in added.items()}
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of = _bytes_by_character() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        names = [f"<0x{byte:02X}>" for byte in range(256)] if self._falls_back else []
        bytes_known = {tokenizer.convert_tokens_to_ids(name) for name in names}
        known = bytes_known - {None, tokenizer.unk_token_id}
        self._byte_ids = frozenset(known - self._added.keys())
        self._has_spaces = self._falls_back or "Metaspace" in kinds
        self._known: dict[tuple[int, int | None], TokenWritten] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def is_byte(self, token: int) -> bool:
        """Whether ``token`` is one byte, whose meaning depends on the bytes beside it."""
        return token in self._byte_ids

    def is_silent(self, token: int) -> bool:
        """Whether ``token`` is not written: a special one, or one that the tokenizer lacks."""
        written = self.token(token)
        return written.special or not written.data

    def token(self, token: int, behind: int | None = None) -> TokenWritten:
        """``token`` ``behind`` another that is written, or by itself; empty: it is not known.

        Vocabularies that mark where words go on or end write it by the token that it is ``behind``.
        """
        if self._bytes_of or self._has_spaces:
            behind = None
        known = self._known.get((token, behind))
        if known is None:
            if len(self._known) >= _MOST_WRITTEN:
                self._known.clear()
            known = TokenWritten(self._data(token, behind), token in self._special)
            self._known[token, behind] = known
        return known

    def _data(self, token: int, behind: int | None) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:  # weights may have more rows than the tokenizer has tokens
            return b""
        if self._bytes_of and self._bytes_of.keys() >= set(written):
            return bytes(self._bytes_of[character] for character in written)
        if not self._has_spaces:
            first = [] if behind is None else [behind]
            start, whole = (str(self._tokenizer.decode(ids)) for ids in (first, [*first, token]))
            return whole.removeprefix(start).encode()
        byte = _BYTE.fullmatch(written)
        return bytes([int(byte[1], 16)]) if byte else written.replace(_SPACE, " ").encode()


def _decoder_kinds(tokenizer: Any) -> frozenset[str]:
    """The kinds of the steps by which a tokenizer's ids become text; empty: they are not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return frozenset()
    steps = [json.loads(backend.decoder.__getstate__())]
    for step in steps:  # grows by the steps of each sequence
        steps += step.get("decoders", [])
    return frozenset(str(step["type"]) for step in steps)


def _bytes_by_character() -> dict[str, int]:
    """The bytes that byte-level vocabularies write as these characters: GPT-2's table.

    Printable bytes stand for themselves, the others, in order, for characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class TextStream:
    """Turns a growing list of ids into pieces of text that are settled.

    Joined they are what the tokenizer makes of prompt and output together, without the prompt's
    text, in whatever steps the ids come. Text is settled when no further id can change it: it does
    not end inside a character; and behind bytes of a vocabulary that falls back to bytes there is
    another token, because one invalid byte breaks all bytes beside it.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._ids = list(prompt)  # the last ones, of which the text of further ones depends
        self._sent = self._forget()  # their text, of which nothing is to be returned
        self._returned = 0
        #: Characters of the text so far, with those that are not settled but whole.
        self.length = 0

    def token(self, token: int) -> TokenWritten:
        """How ``token`` is written behind what was pushed."""
        written = (one for one in reversed(self._ids) if not self._detokenizer.is_silent(one))
        return self._detokenizer.token(token, next(written, None))

    def push(self, ids: tuple[int, ...], *, last: bool = False) -> str:
        """The text that is now settled; with ``last`` all the rest."""
        self._ids += ids
        known = len(self._ids) if last else self._closed()
        text = self._detokenizer.decode(self._ids[:known])
        settled = text if last else text.removesuffix(_BROKEN)
        pairs = zip(self._sent, settled, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._returned += len(settled) - shared
        whole = text if known == len(self._ids) else self._detokenizer.decode(self._ids)
        unsettled = max(0, len(whole.rstrip(_BROKEN)) - max(shared, len(settled)))
        self.length = max(self.length, self._returned + unsettled)
        if shared < len(settled):
            self._sent = settled
            # It takes two decodes to find out which ids can go: not after every token.
            if len(self._ids) > _MOST_IDS and known == len(self._ids) and settled == text:
                self._sent = self._forget()
        return settled[shared:]

    def _closed(self) -> int:
        """How many ids there are before the bytes at the end."""
        end = len(self._ids)
        for at in reversed(range(end)):
            if self._detokenizer.is_byte(self._ids[at]):
                end = at
            elif not self._detokenizer.is_silent(self._ids[at]):
                break
        return end

    def _forget(self) -> str:
        """Keep as few of the last ids as have the same text alone as behind others; return it."""
        count = _WINDOW
        while count < len(self._ids):
            few = self._ids[-count:]
            text = self._detokenizer.decode(few)
            behind_others = self._detokenizer.decode(self._ids[-4 * count :])
            written = (one for one in few if not self._detokenizer.is_silent(one))
            begins_in_bytes = self._detokenizer.is_byte(next(written, few[0]))
            if text and behind_others.endswith(text) and not begins_in_bytes:
                self._ids = few
                return text
            count *= 2
        return self._detokenizer.decode(self._ids)
