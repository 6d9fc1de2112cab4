"""Text and token ids: the target's tokenizer, its chat template, and streamed decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from flowspec.core.run.logprobs import TokenWritten
from flowspec.core.run.turns import Turn
from flowspec.errors import JobError, ModelError
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.same_tokenizer import load_tokenizer

#: Most characters that a chat template may make of a conversation.
MAX_TEMPLATED = 4 << 20
#: Least number of earlier ids decoded together with new ones.
_WINDOW = 8
#: How many tokens a writer remembers.
_MOST_WRITTEN = 1 << 18
_BROKEN = "\N{REPLACEMENT CHARACTER}"
#: How often a text is cut up: once, and for tokens that only its pieces have.
_MOST_CUTS = 8
#: How vocabularies that are no byte-level ones write a byte, and a space.
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

Bounds = Callable[[], AbstractContextManager[None]]


class Tokenizer:
    """The tokenizer of ``directory``.

    ``bounds``: entered for as long as the chat template runs, which is a program of whoever made
    the model.
    """

    def __init__(self, directory: ModelDirectory, bounds: Bounds = nullcontext) -> None:
        self._bounds = bounds
        self._tokenizer: Any = load_tokenizer(directory.path)
        self._template_file = _template_file(directory)
        check_ids(self._tokenizer, directory)
        self._directory = directory
        self._writer = TokenWriter(self._tokenizer)
        self._before = _ids_before_texts(self._tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._added = {str(one): token for token, one in added.items()}
        self._special = {str(one) for one in added.values() if one.special}

    def encode(self, prompt: str, *, raw: bool) -> tuple[int, ...]:
        """Ids of ``prompt``, in the chat template if there is one and unless ``raw``.

        Outside the template they begin with what the tokenizer sets before a text, once, and no
        token of its own ends them. In a raw prompt the texts of special tokens are these tokens;
        in any other one they are text.
        """
        if not raw and self.has_chat_template:
            return self.encode_turns([Turn("user", prompt)])
        ids = self._ids(prompt) if raw else self._plain_ids(prompt)
        first = len(self._before)
        return ids if ids[:first] == self._before else (*self._before, *ids)

    def _ids(self, text: str) -> tuple[int, ...]:
        """``text`` alone, where the texts of special tokens that the model has are these tokens."""
        return self._without(self._unknown, text, split_special_tokens=False)

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        """``text`` alone, without control tokens."""
        return self._without(self._control_ids | self._unknown, text, split_special_tokens=True)

    def _without(
        self, barred: frozenset[int], text: str, *, split_special_tokens: bool
    ) -> tuple[int, ...]:
        """Ids of ``text``, of which none is ``barred``.

        Where one would be, however it is spelled, the text is cut behind its first character: no
        token spans two pieces. A token of one character that cannot be cut is left out.
        """
        pieces = [text]
        done: list[tuple[int, ...]] = []
        for _ in range(_MOST_CUTS):
            read = self._tokenizer(
                pieces, add_special_tokens=False, split_special_tokens=split_special_tokens
            )
            done = [tuple(ids) for ids in read["input_ids"]]
            if all(barred.isdisjoint(ids) for ids in done):
                break
            before = pieces
            pieces = [
                part
                for piece in before
                for part in self._cut_up(barred, piece, split_special_tokens=split_special_tokens)
            ]
            if pieces == before:
                break
        return tuple(token for ids in done for token in ids if token not in barred)

    def _cut_up(
        self, barred: frozenset[int], text: str, *, split_special_tokens: bool
    ) -> list[str]:
        """``text`` cut behind the first character of each of its tokens that is barred."""
        read = self._tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=split_special_tokens,
            return_offsets_mapping=True,
        )
        tokens = zip(read["input_ids"], read["offset_mapping"], strict=True)
        spans = [span for token, span in tokens if token in barred]
        cuts = sorted({start + 1 for start, end in spans if end - start > 1})
        return [text[start:end] for start, end in pairwise((0, *cuts, len(text))) if end > start]

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """Ids of the tokenizer that the model does not have."""
        return frozenset(
            token for token in self._added.values() if token >= self._directory.vocabulary
        )

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of control tokens, but for what stands for all that is unknown."""
        found = {self._added[text] for text in self._control_texts}
        return frozenset(found - {self._tokenizer.unk_token_id})

    @property
    def has_chat_template(self) -> bool:
        """Whether a conversation can be encoded."""
        return bool(self._tokenizer.chat_template)

    @cached_property
    def eos(self) -> frozenset[int]:
        """Ids of the tokens that end a text: the folder's, and the template's behind an answer."""
        self._check_template()
        ids = self._directory.eos | self._ends_of_turn()
        return frozenset(token for token in ids if 0 <= token < self._directory.vocabulary)

    def _ends_of_turn(self) -> frozenset[int]:
        """What the template writes behind an answer, unless that begins what a user says."""
        added = _any_of(self._added)
        asked = _unused_mark([])
        said = _unused_mark([asked])
        system, user, answer = ("system", "c"), ("user", asked), ("assistant", said)
        turns = [user, answer]
        for talk in (turns, [system, *turns], [*turns, user], [system, *turns, user]):
            text = self._example(*talk)
            found = added.match(text.partition(said)[2].lstrip())
            begins = added.findall(text.partition(asked)[0])[-1:] if asked in text else []
            if found and found[0] not in begins:
                return frozenset({self._added[found[0]]})
        return frozenset()

    def _check_template(self) -> None:
        """ModelError if the chat template writes tokens that the model does not have."""
        lacking = (word for word, token in self._added.items() if token in self._unknown)
        found = next((word for word in lacking if word in self._examples), None)
        if found is not None:
            raise ModelError(
                f"the chat template of {self._directory.path} writes {found!r}, whose id "
                f"{self._added[found]} is beyond the model's vocabulary of "
                f"{self._directory.vocabulary}; use the tokenizer that the weights were saved with"
            )

    @cached_property
    def _control_texts(self) -> frozenset[str]:
        """Texts of the tokens that no content may become: special ones, and the template's own.

        DeepSeek's models for example do not mark those that begin a turn as special.
        """
        own = {word for word in self._added if any(map(str.isalnum, word))}
        text = self._examples
        if text or not self.has_chat_template:  # else the template takes no conversation of ours
            own = {word for word in own if word in text}
        return frozenset(self._special | own)

    @cached_property
    def _examples(self) -> str:
        """What the template makes of some conversations."""
        system, user, answer = ("system", "c"), ("user", "a"), ("assistant", "b")
        conversations = [user], [system, user], [user, answer, user], [system, user, answer, user]
        return "".join(self._example(*turns, asked=True) for turns in conversations)

    def _example(self, *turns: tuple[str, str], asked: bool = False) -> str:
        """What the template makes of ``turns``, each a role and a text; empty: it cannot.

        ``asked``: with what begins an answer behind them.
        """
        if not self.has_chat_template:
            return ""
        said = [{"role": role, "content": text} for role, text in turns]
        try:
            return self._templated(said, add_generation_prompt=asked)
        except Exception:  # noqa: BLE001 - who sends the template a conversation is told
            return ""

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return _any_of(self._control_texts)

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Ids of ``turns`` in the chat template, up to where the answer begins.

        JobError if there is no template, or it fails, refuses the conversation or makes too much
        of it.
        """
        if not self.has_chat_template:
            raise JobError(
                "the model has no chat template, so it takes no messages; send it a prompt"
            )
        mark = _unused_mark([turn.content for turn in turns])
        said = [{"role": turn.role, "content": self._marked(turn.content, mark)} for turn in turns]
        template = f"the model's chat template, in its {self._template_file},{self._asks_for}"
        try:
            text = self._templated(said, add_generation_prompt=True)
        except TemplateSyntaxError as error:
            raise JobError(f"{template} is broken: {_one_line(error)}") from None
        except TemplateError as error:
            raise JobError(f"{template} refuses the messages: {_one_line(error)}") from None
        except Exception as error:  # noqa: BLE001 - a template is somebody's program
            kind = type(error).__name__
            raise JobError(
                f"{template} fails on the messages: {kind}: {_one_line(error)}"
            ) from None
        if len(text) > MAX_TEMPLATED:
            raise JobError(
                f"the chat template makes {len(text)} characters of the messages; at most "
                f"{MAX_TEMPLATED} are accepted"
            )
        return tuple(self._unmarked_ids(text, mark))

    @cached_property
    def _asks_for(self) -> str:
        """What the chat template may ask for that no conversation here has, in words."""
        templates = self._tokenizer.chat_template
        text = templates.get("default", "") if isinstance(templates, dict) else templates
        asked = [name for name in ("tools", "documents") if re.search(rf"\b{name}\b", text)]
        return f" which asks for {' and '.join(asked)}," if asked else ""

    def _templated(self, turns: list[dict[str, str]], **more: bool) -> str:
        with self._bounds():
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, **more))

    def _marked(self, content: str, mark: str) -> str:
        """``content`` with ``mark`` inside what would become control tokens."""
        if self._normalised:
            pieces = self._cut_up(self._control_ids, content, split_special_tokens=False)
            content = mark.join(pieces)
        return self._control.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", content)

    @cached_property
    def _normalised(self) -> bool:
        """Whether other texts than their own may become control tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        added = self._tokenizer.added_tokens_decoder
        found = any(added[token].normalized for token in self._control_ids if token in added)
        return found and backend is not None and backend.normalizer is not None

    def _unmarked_ids(self, text: str, mark: str) -> Iterator[int]:
        """Ids of ``text``, where what was marked stays text up to the next control tokens."""
        if mark not in text:
            yield from self._ids(text)
            return
        start = end = 0
        for control in (*self._control.finditer(text), None):
            until = control.start() if control else len(text)
            if mark in text[end:until]:
                yield from self._ids(text[start:end])
                yield from self._plain_ids(text[end:until].replace(mark, ""))
                start = until
            end = control.end() if control else until
        yield from self._ids(text[start:])

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """A new stream of the text behind ``prompt``."""
        return TextStream(self, prompt)

    def is_byte(self, token: int) -> bool:
        """Whether ``token`` is one byte, whose meaning depends on the bytes beside it."""
        return token in self._writer.byte_ids

    def is_silent(self, token: int) -> bool:
        """Whether ``token`` is not written: a special one, or one that the tokenizer lacks."""
        written = self._writer.write(token)
        return written.special or not written.data

    def token(self, token: int, behind: int | None = None) -> TokenWritten:
        """How ``token`` is written: ``behind`` another that is written, or by itself."""
        return self._writer.write(token, behind)

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
        added = tokenizer.added_tokens_decoder
        marked = {token for token, one in added.items() if one.special}
        self._special = marked.union(tokenizer.all_special_ids)
        self._added = {token: str(one) for token, one in added.items()}
        kinds = _decoder_kinds(tokenizer)
        self._bytes_of = _bytes_by_character() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        names = [f"<0x{byte:02X}>" for byte in range(256)] if self._falls_back else []
        bytes_known = {tokenizer.convert_tokens_to_ids(name) for name in names}
        #: Ids of single bytes of a vocabulary that falls back to them.
        self.byte_ids = frozenset(bytes_known - {None, tokenizer.unk_token_id} - self._added.keys())
        self._has_spaces = self._falls_back or "Metaspace" in kinds
        self._known: dict[tuple[int, int | None], TokenWritten] = {}

    def write(self, token: int, behind: int | None = None) -> TokenWritten:
        """The bytes of ``token``; none if the tokenizer does not know it.

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


def _template_file(directory: ModelDirectory) -> str:
    """Where the chat template is, as the library looks for it."""
    if directory.has("chat_template.jinja"):
        return "chat_template.jinja"
    folder = "additional_chat_templates"
    return folder if (directory.path / folder).is_dir() else "tokenizer_config.json"


def check_ids(tokenizer: Any, directory: ModelDirectory) -> None:
    """ModelError if texts may become ids for which the model has no embedding.

    Special ones may be there: a tokenizer that a family shares has those of its other members.
    """
    added = tokenizer.added_tokens_decoder
    beyond = {
        token: text
        for text, token in tokenizer.get_vocab().items()
        if token >= directory.vocabulary and not (token in added and added[token].special)
    }
    if beyond:
        first = min(beyond)
        raise ModelError(
            f"the tokenizer in {directory.path} has {len(beyond)} tokens beyond the model's "
            f"vocabulary of {directory.vocabulary}, the first of them {beyond[first]!r} with id "
            f"{first}; use the tokenizer that the weights were saved with"
        )


def _ids_before_texts(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer's post-processor sets before a text."""
    whole = tokenizer("a")["input_ids"]
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    places = range(len(whole) - len(alone) + 1)
    return next((tuple(whole[:at]) for at in places if whole[at : at + len(alone)] == alone), ())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of ``texts``, the longest first; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _unused_mark(texts: Iterable[str]) -> str:
    """A character that is in none of ``texts``: one that Unicode keeps for such uses."""
    used = set().union(*texts)
    return next(chr(code) for code in range(0xFDD0, 0x10FFFE) if chr(code) not in used)


class TextStream:
    """Turns a growing list of ids into pieces of text that are settled.

    Joined they are what the tokenizer makes of prompt and output together, without the prompt's
    text, in whatever steps the ids come. Text is settled when no further id can change it: it does
    not end inside a character; and behind bytes of a vocabulary that falls back to bytes there is
    another token, because one invalid byte breaks all bytes beside it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)  # the last ones, of which the text of further ones depends
        self._sent = self._forget()  # their text, of which nothing is to be returned
        self._returned = 0
        #: Characters of the text so far, with those that are not settled but whole.
        self.length = 0

    def token(self, token: int) -> TokenWritten:
        """How ``token`` is written behind what was pushed."""
        written = (one for one in reversed(self._ids) if not self._tokenizer.is_silent(one))
        return self._tokenizer.token(token, next(written, None))

    def push(self, ids: tuple[int, ...], *, last: bool = False) -> str:
        """The text that is now settled; with ``last`` all the rest."""
        self._ids += ids
        known = len(self._ids) if last else self._closed()
        text = self._tokenizer.decode(self._ids[:known])
        settled = text if last else text.removesuffix(_BROKEN)
        pairs = zip(self._sent, settled, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._returned += len(settled) - shared
        whole = text if known == len(self._ids) else self._tokenizer.decode(self._ids)
        unsettled = max(0, len(whole.rstrip(_BROKEN)) - max(shared, len(settled)))
        self.length = max(self.length, self._returned + unsettled)
        if shared < len(settled):
            self._sent = settled
            if known == len(self._ids) and settled == text:
                self._sent = self._forget()
        return settled[shared:]

    def _closed(self) -> int:
        """How many ids there are before the bytes at the end."""
        end = len(self._ids)
        for at in reversed(range(end)):
            if self._tokenizer.is_byte(self._ids[at]):
                end = at
            elif not self._tokenizer.is_silent(self._ids[at]):
                break
        return end

    def _forget(self) -> str:
        """Keep as few of the last ids as have the same text alone as behind others; return it."""
        count = _WINDOW
        while count < len(self._ids):
            few = self._ids[-count:]
            text = self._tokenizer.decode(few)
            behind_others = self._tokenizer.decode(self._ids[-4 * count :])
            written = (one for one in few if not self._tokenizer.is_silent(one))
            begins_in_bytes = self._tokenizer.is_byte(next(written, few[0]))
            if text and behind_others.endswith(text) and not begins_in_bytes:
                self._ids = few
                return text
            count *= 2
        return self._tokenizer.decode(self._ids)
