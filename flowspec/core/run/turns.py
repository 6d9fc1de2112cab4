"""The turns of a conversation, as a job's ``messages``: the input of the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowspec.errors import JobError

#: Who may speak. A template may refuse some of them, or an order of them.
ROLES = ("system", "user", "assistant")
#: Most turns of one conversation.
MAX_TURNS = 4096
#: Longest conversation, all contents together, bytes of UTF-8.
MAX_TURNS_BYTES = 1 << 20
#: A conversation as callers may give it.
Messages = Iterable["Turn | Mapping[str, str]"]
_EXPECTED = (
    'messages is a list like [{"role": "user", "content": "Hello"}], '
    f"roles are {', '.join(ROLES)}, contents are text"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says. ``role``: one of ROLES; ``content`` may be empty."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES or not isinstance(self.content, str):
            raise JobError(_EXPECTED)


def turns_of(value: object) -> tuple[Turn, ...]:
    """The conversation in ``value``, a list of turns or mappings; JobError if it is none."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise JobError(_EXPECTED)
    return checked_turns(tuple(map(_turn, value)))


def _turn(value: object) -> Turn:
    if isinstance(value, Turn):
        return value
    if not isinstance(value, Mapping) or value.keys() != {"role", "content"}:
        raise JobError(_EXPECTED)
    return Turn(value["role"], value["content"])


def checked_turns(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """``turns``; JobError if there are none or too many, they say nothing, or too much."""
    if not turns:
        raise JobError("messages is empty; give it at least one turn")
    if len(turns) > MAX_TURNS:
        raise JobError(f"messages has {len(turns)} turns; at most {MAX_TURNS} are accepted")
    if not any(turn.content.strip() for turn in turns):
        raise JobError("messages say nothing; give one of them some content")
    try:
        size = sum(len(turn.content.encode()) for turn in turns)
    except UnicodeEncodeError:
        raise JobError(
            "messages is not valid Unicode text: it holds half of a surrogate pair"
        ) from None
    if size > MAX_TURNS_BYTES:
        raise JobError(f"messages are longer than {MAX_TURNS_BYTES} bytes: they have {size}")
    return turns


def turns_text(turns: Sequence[Turn]) -> str:
    """``turns`` as a job's field."""
    return json.dumps(
        [{"role": turn.role, "content": turn.content} for turn in turns], ensure_ascii=False
    )


def read_turns(text: str) -> tuple[Turn, ...]:
    """The inverse of ``turns_text``; JobError for any other text."""
    try:
        return turns_of(json.loads(text))
    except (ValueError, RecursionError):
        raise JobError(_EXPECTED) from None
