"""A job as submitted: flat text fields, checked once and parsed into a spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import partial
from typing import Any, TypedDict, TypeGuard, TypeVar, Unpack

import numpy as np

from flowspec.core.run.logprobs import MOST_ALTERNATIVES
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.turns import (
    Messages,
    Turn,
    checked_turns,
    read_turns,
    turns_of,
    turns_text,
)
from flowspec.errors import JobError

DEFAULT_STRATEGY = "auto"
DEFAULT_MAX_NEW_TOKENS = 128
#: Longest prompt accepted, as text or as a list of ids, in bytes of UTF-8.
MAX_PROMPT_BYTES = 1 << 20
#: Longest value of the field ``messages``: its texts, which JSON may write at six times their size,
#: and what stands around them.
MAX_MESSAGES_BYTES = 8 << 20
#: Longest value of any other field, in bytes of UTF-8.
MAX_FIELD_BYTES = 1 << 10
#: Most tokens a job may request; the model's context is usually the lower limit.
MAX_NEW_TOKENS = 1 << 20

#: Highest priority of a job, and lowest below 0.
MOST_PRIORITY = 100
#: Longest wait for its beginning that a job may name, seconds.
MOST_WAIT_SECONDS = 86400

#: A submission with this field alone is not a job: it cancels the job it names.
CANCEL = "cancel"

FIELDS = (
    "prompt",
    "prompt_ids",
    "messages",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "strategy",
    "idempotency_key",
    "raw",
    "record",
    "tokenize",
    "priority",
    "wait_seconds",
    "reuse",
    "cache_salt",
    "logprobs",
)

_MOST_BYTES = {
    "prompt": MAX_PROMPT_BYTES,
    "prompt_ids": MAX_PROMPT_BYTES,
    "messages": MAX_MESSAGES_BYTES,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The contents of a job. Exactly one of ``prompt``, ``prompt_ids`` and ``messages`` is set.

    ``raw``: do not apply the tokenizer's chat template to ``prompt``. ``messages``: a conversation,
    to which it is always applied. ``record``: keep a recording of the run. Generation ends at
    ``max_new_tokens``, at the end-of-sequence token or when the context is full. ``tokenize``: the
    job ends without any, once the ids of its prompt, which may be longer than the context or empty,
    are known. ``priority``: of the waiting jobs
    those of the highest one begin first. ``wait_seconds``: the job ends with an error if it has not
    begun by then; 0: it waits as long as it has to. ``reuse``: begin with rows that are kept of
    earlier jobs, and keep this job's; only of and for those with this ``cache_salt``.
    ``logprobs``: return each token's log-probability, and those of as many of the best tokens in
    its place; None: none.
    """

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    sampling: Sampling = Sampling()
    strategy: str = DEFAULT_STRATEGY
    idempotency_key: str = ""
    raw: bool = False
    record: bool = False
    messages: tuple[Turn, ...] | None = None
    tokenize: bool = False
    priority: int = 0
    wait_seconds: float = 0.0
    reuse: bool = True
    cache_salt: str = ""
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_source()
        self._check_prompt()
        for name, text in (
            ("prompt", self.prompt),
            ("strategy", self.strategy),
            ("idempotency_key", self.idempotency_key),
            ("cache_salt", self.cache_salt),
        ):
            _check_text(name, text or "")
        if self.prompt_ids is not None and (not self.prompt_ids or min(self.prompt_ids) < 0):
            raise JobError("prompt_ids must be a list of at least one token id, none negative")
        if self.messages is not None:
            checked_turns(self.messages)
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise JobError(
                f"max_new_tokens is {self.max_new_tokens}; expected 1 to {MAX_NEW_TOKENS}"
            )
        self._check_waiting()
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise JobError(f"logprobs is {self.logprobs}; expected 0 to {MOST_ALTERNATIVES}")

    def _check_prompt(self) -> None:
        """JobError for a prompt that says nothing; a raw one may be white space."""
        if self.prompt is None or self.tokenize:
            return
        if not (self.prompt if self.raw else self.prompt.strip()):
            raise JobError(
                "the prompt is empty; give it at least one character"
                + ("" if self.raw else " that is not a space")
            )

    def _check_waiting(self) -> None:
        """JobError for a priority or a wait that is out of range."""
        if abs(self.priority) > MOST_PRIORITY:
            raise JobError(
                f"priority is {self.priority}; expected -{MOST_PRIORITY} to {MOST_PRIORITY}"
            )
        if not 0 <= self.wait_seconds <= MOST_WAIT_SECONDS:
            raise JobError(
                f"wait_seconds is {self.wait_seconds:g}; expected 0 to {MOST_WAIT_SECONDS}"
            )

    def _check_source(self) -> None:
        """JobError unless the job says in exactly one way what it begins with."""
        sources = ("prompt", "prompt_ids", "messages")
        given = [name for name in sources if getattr(self, name) is not None]
        if not given:
            raise JobError(
                "the job has no prompt; give it either 'prompt' or 'prompt_ids': a text, or a "
                "list of ids like [1, 2], or 'messages'"
            )
        if len(given) > 1:
            raise JobError(f"the job has '{given[0]}' and '{given[1]}'; leave out one of them")
        if self.messages is not None and self.raw:
            raise JobError("the job has 'messages' and 'raw'; messages need the chat template")

    def _check_types(self) -> None:
        if self.prompt is not None:
            _expect("prompt", self.prompt, str, "text")
        if self.prompt_ids is not None:
            token_ids(self.prompt_ids)
        whole_number("max_new_tokens", self.max_new_tokens)
        sampling = self.sampling
        _expect("sampling", sampling, Sampling, "a Sampling")
        checked_sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
        _expect("strategy", self.strategy, str, "text")
        _expect("idempotency_key", self.idempotency_key, str, "text")
        _expect("raw", self.raw, bool, "True or False")
        _expect("record", self.record, bool, "True or False")
        _expect("tokenize", self.tokenize, bool, "True or False")
        whole_number("priority", self.priority)
        _number("wait_seconds", self.wait_seconds)
        _expect("reuse", self.reuse, bool, "True or False")
        _expect("cache_salt", self.cache_salt, str, "text")
        if self.logprobs is not None:
            whole_number("logprobs", self.logprobs)

    def fields(self) -> dict[str, str]:
        """The spec as flat text fields for ``XADD``; most defaults are left out."""
        sampling = self.sampling
        plain = Sampling()
        values: dict[str, object] = {
            "prompt": self.prompt,
            "prompt_ids": json.dumps([int(token) for token in self.prompt_ids])
            if self.prompt_ids is not None
            else None,
            "messages": turns_text(self.messages) if self.messages is not None else None,
            "max_new_tokens": self.max_new_tokens,
            "temperature": sampling.temperature
            if sampling.temperature != plain.temperature
            else None,
            "top_k": sampling.top_k or None,
            "top_p": sampling.top_p if sampling.top_p != plain.top_p else None,
            "seed": sampling.seed or None,
            "strategy": self.strategy,
            "idempotency_key": self.idempotency_key or None,
            "raw": 1 if self.raw else None,
            "record": 1 if self.record else None,
            "tokenize": 1 if self.tokenize else None,
            "priority": self.priority or None,
            "wait_seconds": self.wait_seconds or None,
            "reuse": None if self.reuse else 0,
            "cache_salt": self.cache_salt or None,
            "logprobs": self.logprobs,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


class JobOptions(TypedDict, total=False):
    """What a caller may say of a job beside its prompt, as in ``JobSpec`` and ``Sampling``."""

    prompt_ids: Iterable[int] | None
    messages: Messages | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    strategy: str
    raw: bool
    record: bool
    idempotency_key: str
    priority: int
    wait_seconds: float
    reuse: bool
    cache_salt: str
    logprobs: int | None


def job_spec(prompt: str | None = None, **options: Unpack[JobOptions]) -> JobSpec:
    """The job that a caller describes by values of any type; JobError names the first wrong one."""
    given: dict[str, Any] = dict(options)
    plain = Sampling()
    sampling = checked_sampling(
        *(given.pop(field.name, getattr(plain, field.name)) for field in fields_of(Sampling))
    )
    read: dict[str, Callable[[Any], object]] = {
        "prompt_ids": token_ids,
        "messages": turns_of,
        "priority": partial(whole_number, "priority"),
        "logprobs": partial(whole_number, "logprobs"),
        "wait_seconds": partial(_number, "wait_seconds"),
    }
    for name, reader in read.items():
        if given.get(name) is not None:
            given[name] = reader(given[name])
    return JobSpec(prompt=prompt, sampling=sampling, **given)


def checked_sampling(temperature: object, top_k: object, top_p: object, seed: object) -> Sampling:
    """A ``Sampling`` of values of any type; JobError names the first that is no such number."""
    return Sampling(
        _number("temperature", temperature),
        whole_number("top_k", top_k),
        _number("top_p", top_p),
        whole_number("seed", seed),
    )


def token_ids(value: object) -> tuple[int, ...]:
    """The ids in ``value``, a prompt's ``prompt_ids``; JobError unless it is a list of integers."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        ids = tuple(value)
        if all(_is_whole(token) for token in ids):
            return ids
    raise JobError(f"prompt_ids is {shown(value)}; expected a list of token ids like [1, 2, 3]")


def whole_number(name: str, value: object) -> int:
    """``value`` of the argument ``name``; JobError unless it is a whole number."""
    if not _is_whole(value):
        raise JobError(f"{name} is {shown(value)}; expected a whole number")
    return value


def parse(fields: Mapping[str, str]) -> JobSpec:
    """Parse flat ``fields``; JobError names the first error in them."""
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise JobError(f"unknown job field {unknown[0][:60]!r}; the fields are {', '.join(FIELDS)}")
    for name, text in fields.items():
        _check_text(name, text)
    priority, wait_seconds = waiting_terms(fields)
    return JobSpec(
        prompt=fields.get("prompt"),
        prompt_ids=_read(fields, "prompt_ids", _ids, "a list of token ids like [1, 2, 3]", None),
        max_new_tokens=_read(
            fields, "max_new_tokens", int, "a whole number", DEFAULT_MAX_NEW_TOKENS
        ),
        sampling=Sampling(
            temperature=_read(fields, "temperature", float, "a number", 0.0),
            top_k=_read(fields, "top_k", int, "a whole number", 0),
            top_p=_read(fields, "top_p", float, "a number", 1.0),
            seed=_read(fields, "seed", int, "a whole number", 0),
        ),
        strategy=fields.get("strategy", DEFAULT_STRATEGY),
        idempotency_key=fields.get("idempotency_key", ""),
        raw=_read(fields, "raw", _flag, "0 or 1", False),
        record=_read(fields, "record", _flag, "0 or 1", False),
        messages=read_turns(fields["messages"]) if "messages" in fields else None,
        tokenize=_read(fields, "tokenize", _flag, "0 or 1", False),
        priority=priority,
        wait_seconds=wait_seconds,
        reuse=_read(fields, "reuse", _flag, "0 or 1", True),
        cache_salt=fields.get("cache_salt", ""),
        logprobs=_read(fields, "logprobs", int, "a whole number", None),
    )


def waiting_terms(fields: Mapping[str, str]) -> tuple[int, float]:
    """``priority`` and ``wait_seconds`` in flat ``fields``."""
    return (
        _read(fields, "priority", int, "a whole number", 0),
        _read(fields, "wait_seconds", float, "a number", 0.0),
    )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    wrong = f"{name} is {shown(value)}; expected a number"
    if not isinstance(value, float | np.floating) and not _is_whole(value):
        raise JobError(wrong)
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        raise JobError(wrong) from None


def _expect(name: str, value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise JobError(f"{name} is {shown(value)}; expected {expected}")


def shown(value: object) -> str:
    """``value`` for an error: on one line, and not long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no integers of thousands of digits
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _check_text(name: str, text: str) -> None:
    most = _MOST_BYTES.get(name, MAX_FIELD_BYTES)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise JobError(
            f"{name} is not valid Unicode text: it holds half of a surrogate pair"
        ) from None
    if size > most:
        raise JobError(f"{name} is longer than {most} bytes: it has {size}")


def _read(
    fields: Mapping[str, str], name: str, kind: Callable[[str], T], expected: str, default: T
) -> T:
    text = fields.get(name)
    if text is None:
        return default
    try:
        return kind(text)
    except (ValueError, OverflowError, RecursionError):
        raise JobError(f"{name} is {text[:60]!r}; expected {expected}") from None


def _ids(text: str) -> tuple[int, ...] | None:
    ids = json.loads(text)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError
    return tuple(ids)


def _flag(text: str) -> bool:
    if text.lower() not in {"0", "1", "false", "true"}:
        raise ValueError
    return text.lower() in {"1", "true"}
