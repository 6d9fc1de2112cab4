"""What a chat template, which is a program of whoever made the model, makes of conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes

from flowspec.errors import JobError
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.formats import parsed_template, template_file

#: Most characters that a chat template may make of a conversation.
MAX_TEMPLATED = 4 << 20

Bounds = Callable[[], AbstractContextManager[None]]
#: A turn's role and its text.
Said = tuple[str, str]


class ChatTemplate:
    """The chat template of ``tokenizer``, one of the library's, from ``directory``.

    ``bounds``: entered for as long as it runs.
    """

    def __init__(self, tokenizer: Any, directory: ModelDirectory, bounds: Bounds) -> None:
        self._tokenizer = tokenizer
        self._file = template_file(directory.path)
        self._bounds = bounds

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return bool(self._tokenizer.chat_template)

    def conversation(self, turns: Sequence[Said]) -> str:
        """``turns`` up to where the answer begins.

        JobError if there is no template, or it fails, refuses the conversation or makes too much
        of it.
        """
        if not self.exists:
            raise JobError(
                "the model has no chat template, so it takes no messages; send it a prompt"
            )
        try:
            text = self._templated(turns, asked=True)
        except Exception as error:  # noqa: BLE001 - a template is somebody's program
            raise JobError(
                f"the model's chat template, in its {self._file},{self._asks_for} {_what(error)}"
            ) from None
        if len(text) > MAX_TEMPLATED:
            raise JobError(
                f"the chat template makes {len(text)} characters of the messages; at most "
                f"{MAX_TEMPLATED} are accepted"
            )
        return text

    @cached_property
    def examples(self) -> str:
        """What it makes of some conversations; empty: it takes none of them, or there is none."""
        system = ("system", "c")
        user = ("user", "a")
        answer = ("assistant", "b")
        conversations = [user], [system, user], [user, answer, user], [system, user, answer, user]
        return "".join(self._example(turns, asked=True) for turns in conversations)

    def end_of_answer(self, added: Iterable[str]) -> str | None:
        """Which of the tokens ``added`` it writes behind an answer, unless a user's turn begins so.

        None: none of them.
        """
        tokens = any_of(added)
        asked = unused_mark([])
        said = unused_mark([asked])
        system = ("system", "c")
        user = ("user", asked)
        answer = ("assistant", said)
        turns = [user, answer]
        for talk in (turns, [system, *turns], [*turns, user], [system, *turns, user]):
            text = self._example(talk)
            found = tokens.match(text.partition(said)[2].lstrip())
            begins = tokens.findall(text.partition(asked)[0])[-1:] if asked in text else []
            if found and found[0] not in begins:
                return found[0]
        return None

    def _example(self, turns: Sequence[Said], *, asked: bool = False) -> str:
        """``turns`` by the template; empty: it cannot write them."""
        if not self.exists:
            return ""
        try:
            return self._templated(turns, asked=asked)
        except Exception:  # noqa: BLE001 - who sends the template a conversation is told
            return ""

    @cached_property
    def _asks_for(self) -> str:
        """What it asks for that no conversation here has, in words; empty: nothing known."""
        templates = self._tokenizer.chat_template
        text = templates.get("default", "") if isinstance(templates, dict) else templates
        try:
            with self._bounds():
                parsed = parsed_template(text)
        except (TemplateSyntaxError, RecursionError):  # tags of the library's own are not Jinja's
            return ""
        names = {one.name for one in parsed.find_all(nodes.Name) if one.ctx == "load"}
        asked = sorted(names & {"documents", "tools"})
        return f" which asks for {' and '.join(asked)}," if asked else ""

    def _templated(self, turns: Sequence[Said], *, asked: bool) -> str:
        """``turns``; ``asked``: with what begins an answer behind them."""
        said = [{"role": role, "content": content} for role, content in turns]
        with self._bounds():
            text = self._tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=asked
            )
        return str(text)


def _what(error: Exception) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    match error:
        case TemplateSyntaxError():
            return f"is broken: {text}"
        case TemplateError():
            return f"refuses the messages: {text}"
        case _:
            return f"fails on the messages: {type(error).__name__}: {text}"


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of ``texts``, the longest first; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def unused_mark(texts: Iterable[str]) -> str:
    """A character that is in none of ``texts``: one that Unicode keeps for such uses."""
    used = set().union(*texts)
    return next(chr(code) for code in range(0xFDD0, 0x10FFFE) if chr(code) not in used)
