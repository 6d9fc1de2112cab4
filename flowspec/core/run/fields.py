"""The fields of a submitted job: what each holds, as text and as a caller's value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import numpy as np

from flowspec.core.run.turns import read_turns, turns_of, turns_text
from flowspec.errors import JobError

T = TypeVar("T")

DEFAULT_STRATEGY = "auto"
DEFAULT_MAX_NEW_TOKENS = 128


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        ids = tuple(value)
        if all(_is_whole(token) for token in ids):
            return ids
    raise JobError(f"is {shown(value)}; expected a list of token ids like [1, 2, 3]", name)


def whole_number(name: str, value: object) -> int:
    """``value`` of the argument ``name``; JobError unless it is a whole number."""
    if not _is_whole(value):
        raise JobError(f"is {shown(value)}; expected a whole number", name)
    return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    wrong = JobError(f"is {shown(value)}; expected a number", name)
    if not isinstance(value, float | np.floating) and not _is_whole(value):
        raise wrong
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        raise wrong from None


def expect(name: str, value: object, kind: type, expected: str) -> None:
    """JobError unless ``value``, of the argument ``name``, is a ``kind``."""
    if not isinstance(value, kind):
        raise JobError(f"is {shown(value)}; expected {expected}", name)


def shown(value: object) -> str:
    """``value`` for an error: on one line, and not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integers of thousands of digits
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def read_list(text: str, of: type[T]) -> tuple[T, ...]:
    """The values of a JSON array of this type alone; ValueError if ``text`` is none."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError from None
    if not isinstance(found, list) or not all(type(value) is of for value in found):
        raise ValueError
    return tuple(found)


def read_ids(text: str) -> tuple[int, ...]:
    """Token ids from a JSON array; ValueError if ``text`` is none."""
    return read_list(text, int)


def _flag(text: str) -> bool:
    if text.lower() not in {"0", "1", "false", "true"}:
        raise ValueError
    return text.lower() in {"1", "true"}


@dataclass(frozen=True, slots=True)
class FieldKind:
    """What a field holds. ``parse``: its value from a submission's text, ``text``: the inverse.

    ``check(name, value)``: a caller's value as one of this kind; JobError for any other.
    ``expected``: what an error about a text says.
    """

    parse: Callable[[str], Any]
    check: Callable[[str, Any], Any]
    expected: str = ""
    text: Callable[[Any], str] = str


def _expected(kind: type, expected: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: object) -> object:
        expect(name, value, kind, expected)
        return value

    return check


TEXT = FieldKind(str, _expected(str, "text"))
WHOLE = FieldKind(int, whole_number, "a whole number")
NUMBER = FieldKind(float, _number, "a number")
FLAG = FieldKind(_flag, _expected(bool, "True or False"), "0 or 1", lambda value: str(int(value)))
IDS = FieldKind(
    read_ids,
    _token_ids,
    "a list of token ids like [1, 2, 3]",
    lambda ids: json.dumps([int(token) for token in ids]),
)
TURNS = FieldKind(read_turns, lambda _, value: turns_of(value), text=turns_text)


@dataclass(frozen=True, slots=True)
class JobField:
    """A field of a submission: what it holds, and its value where it is left out."""

    kind: FieldKind
    default: Any = None


#: All fields of a submission, in the order in which errors name them.
FIELDS: Mapping[str, JobField] = {
    "prompt": JobField(TEXT),
    "prompt_ids": JobField(IDS),
    "messages": JobField(TURNS),
    "max_new_tokens": JobField(WHOLE, DEFAULT_MAX_NEW_TOKENS),
    "temperature": JobField(NUMBER, 0.0),
    "top_k": JobField(WHOLE, 0),
    "top_p": JobField(NUMBER, 1.0),
    "seed": JobField(WHOLE, 0),
    "strategy": JobField(TEXT, DEFAULT_STRATEGY),
    "idempotency_key": JobField(TEXT, ""),
    "raw": JobField(FLAG, False),
    "record": JobField(FLAG, False),
    "tokenize": JobField(FLAG, False),
    "priority": JobField(WHOLE, 0),
    "wait_seconds": JobField(NUMBER, 0.0),
    "reuse": JobField(FLAG, True),
    "cache_salt": JobField(TEXT, ""),
    "logprobs": JobField(WHOLE),
}
