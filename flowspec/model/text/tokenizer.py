"""Text to ids: the target's tokenizer and its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import pairwise
from typing import Any

from flowspec.core.run.turns import Turn
from flowspec.errors import ModelError
from flowspec.model.text.chat_template import Bounds, ChatTemplate, any_of, unused_mark
from flowspec.model.text.detokenizer import Detokenizer, TextStream
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.same_tokenizer import load_tokenizer

#: How often a text is cut up: once, and for tokens that only its pieces have.
_MOST_CUTS = 8


class Tokenizer:
    """The tokenizer of ``directory``.

    ``bounds``: entered for as long as the chat template runs, which is a program of whoever made
    the model.
    """

    def __init__(self, directory: ModelDirectory, bounds: Bounds = nullcontext) -> None:
        self._tokenizer: Any = load_tokenizer(directory.path)
        self._template = ChatTemplate(self._tokenizer, directory, bounds)
        check_ids(self._tokenizer, directory)
        self._directory = directory
        #: Ids to text.
        self.detokenizer = Detokenizer(self._tokenizer)
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
        return self._template.exists

    @cached_property
    def eos(self) -> frozenset[int]:
        """Ids of the tokens that end a text: the folder's, and the template's behind an answer."""
        self._check_template()
        end = self._template.end_of_answer(self._added)
        ids = self._directory.eos | (set() if end is None else {self._added[end]})
        return frozenset(token for token in ids if 0 <= token < self._directory.vocabulary)

    def _check_template(self) -> None:
        """ModelError if the chat template writes tokens that the model does not have."""
        lacking = (word for word, token in self._added.items() if token in self._unknown)
        found = next((word for word in lacking if word in self._template.examples), None)
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
        text = self._template.examples
        if text or not self.has_chat_template:  # else the template takes no conversation of ours
            own = {word for word in own if word in text}
        return frozenset(self._special | own)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return any_of(self._control_texts)

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Ids of ``turns`` in the chat template, up to where the answer begins.

        JobError if there is no template, or it fails, refuses the conversation or makes too much
        of it.
        """
        mark = unused_mark([turn.content for turn in turns])
        marked = [(turn.role, self._marked(turn.content, mark)) for turn in turns]
        return tuple(self._unmarked_ids(self._template.conversation(marked), mark))

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
        return TextStream(self.detokenizer, prompt)


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
