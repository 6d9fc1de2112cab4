"""Text and token ids: the target's tokenizer, its chat template, and streamed decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from flowspec.core.run.turns import Turn
from flowspec.errors import JobError, ModelError
from flowspec.model.directory import ModelDirectory

#: Most characters that a chat template may make of a conversation.
MAX_TEMPLATED = 4 << 20
#: Earlier ids decoded together with new ones, so that pieces join as in the whole text.
_WINDOW = 8


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

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


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
