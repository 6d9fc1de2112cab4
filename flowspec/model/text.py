"""Text and token ids: the target's tokenizer, its chat template, and streamed decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from flowspec.core.run.logprobs import TokenWritten
from flowspec.core.run.turns import Turn
from flowspec.errors import JobError, ModelError
from flowspec.model.directory import ModelDirectory

#: Most characters that a chat template may make of a conversation.
MAX_TEMPLATED = 4 << 20
#: Earlier ids decoded together with new ones, so that pieces join as in the whole text.
_WINDOW = 8
#: How vocabularies that are no byte-level ones write a byte, and a space.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
    """The tokenizer of ``directory``."""

    def __init__(self, directory: ModelDirectory) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory.path, trust_remote_code=False, local_files_only=True
            )
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ModelError(
                f"the tokenizer in {directory.path} cannot be loaded: {error}"
            ) from None
        self._template_file = (
            "chat_template.jinja"
            if directory.has("chat_template.jinja")
            else "tokenizer_config.json"
        )
        self._writer = TokenWriter(self._tokenizer)

    def encode(self, prompt: str, *, raw: bool) -> tuple[int, ...]:
        """Ids of ``prompt``, in the chat template if there is one and unless ``raw``."""
        if raw or not self.has_chat_template:
            return tuple(self._tokenizer(prompt)["input_ids"])
        return self.encode_turns([Turn("user", prompt)])

    @property
    def has_chat_template(self) -> bool:
        """Whether a conversation can be encoded."""
        return bool(self._tokenizer.chat_template)

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Ids of ``turns`` in the chat template, up to where the answer begins.

        JobError if there is no template, or it refuses the conversation or makes too much of it.
        """
        if not self.has_chat_template:
            raise JobError(
                "the model has no chat template, so it takes no messages; send it a prompt"
            )
        said = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            why = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, TemplateSyntaxError):
                raise JobError(
                    f"the model's chat template, in its {self._template_file}, is broken: {why}"
                ) from None
            raise JobError(f"the model's chat template refuses the messages: {why}") from None
        if len(text) > MAX_TEMPLATED:
            raise JobError(
                f"the chat template makes {len(text)} characters of the messages; at most "
                f"{MAX_TEMPLATED} are accepted"
            )
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def stream(self) -> TextStream:
        """A new stream of text."""
        return TextStream(self)

    def token(self, token: int) -> TokenWritten:
        """How ``token`` is written by itself."""
        return self._writer.write(token)

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class TokenWriter:
    """How tokens of ``tokenizer``, one of the library's, are written one by one.

    Texts of several tokens are not their joined decodings: a character's bytes may be spread over
    some of them, and decoding leaves out a first space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._added = {token: str(one) for token, one in tokenizer.added_tokens_decoder.items()}
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of = _bytes_by_character() if "ByteLevel" in kinds else {}
        self._has_spaces = bool(kinds & {"Metaspace", "ByteFallback"})
        self._known: dict[int, TokenWritten] = {}

    def write(self, token: int) -> TokenWritten:
        """The bytes of ``token``; none if the tokenizer does not know it."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = TokenWritten(self._data(token), token in self._special)
        return known

    def _data(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written = self._tokenizer.convert_ids_to_tokens(token)
        if written is None:  # weights may have more rows than the tokenizer has tokens
            return b""
        if self._bytes_of and self._bytes_of.keys() >= set(written):
            return bytes(self._bytes_of[character] for character in written)
        if not self._has_spaces:
            return str(self._tokenizer.decode([token])).encode()
        byte = _BYTE.fullmatch(written)
        return bytes([int(byte[1], 16)]) if byte else written.replace(_SPACE, " ").encode()


def _decoder_kinds(tokenizer: Any) -> frozenset[str]:
    """The kinds of the steps by which a tokenizer's ids become text; empty: they are not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return frozenset()
    found = json.loads(backend.decoder.__getstate__())
    steps = found.get("decoders", [found])
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
    """Turns a growing list of ids into pieces of text that end on whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # ids from here on are decoded together
        self._given = 0  # number of ids whose text was returned

    def push(self, ids: tuple[int, ...], *, last: bool = False) -> str:
        """The text that is now complete; with ``last`` all the rest, broken characters included."""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._start : self._given])
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._start = max(0, len(self._ids) - _WINDOW)
        self._given = len(self._ids)
        return text[len(before) :]
