"""A job as submitted: flat text fields, checked once and parsed into a spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from flowspec.core.run.fields import DEFAULT_MAX_NEW_TOKENS, DEFAULT_STRATEGY, FIELDS, expect
from flowspec.core.run.logprobs import MOST_ALTERNATIVES
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.turns import (
    Messages,
    Turn,
)
from flowspec.errors import JobError

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

_MOST_BYTES = {
    "prompt": MAX_PROMPT_BYTES,
    "prompt_ids": MAX_PROMPT_BYTES,
    "messages": MAX_MESSAGES_BYTES,
}

_SAMPLED = frozenset(Sampling.__dataclass_fields__)
_ALWAYS_WRITTEN = frozenset({"max_new_tokens", "strategy"})


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
            raise JobError("must be a list of at least one token id, none negative", "prompt_ids")
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise JobError(
                f"is {self.max_new_tokens}; expected 1 to {MAX_NEW_TOKENS}", "max_new_tokens"
            )
        self._check_waiting()
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise JobError(f"is {self.logprobs}; expected 0 to {MOST_ALTERNATIVES}", "logprobs")

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
                f"is {self.priority}; expected -{MOST_PRIORITY} to {MOST_PRIORITY}", "priority"
            )
        if not 0 <= self.wait_seconds <= MOST_WAIT_SECONDS:
            raise JobError(
                f"is {self.wait_seconds:g}; expected 0 to {MOST_WAIT_SECONDS}", "wait_seconds"
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
        expect("sampling", self.sampling, Sampling, "a Sampling")
        for name, field in FIELDS.items():
            value = self._value(name)
            if value is not None or field.default is not None:
                field.kind.check(name, value)

    def _value(self, name: str) -> Any:
        return getattr(self.sampling if name in _SAMPLED else self, name)

    def fields(self) -> dict[str, str]:
        """The spec as flat text fields for ``XADD``; most defaults are left out."""
        values = {name: self._value(name) for name in FIELDS}
        return {
            name: FIELDS[name].kind.text(value)
            for name, value in values.items()
            if value is not None and (value != FIELDS[name].default or name in _ALWAYS_WRITTEN)
        }


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
    for name, field in FIELDS.items():
        if name in given and (given[name] is not None or field.default is not None):
            given[name] = field.kind.check(name, given[name])
    return _of_values({"prompt": prompt, **given})


def _of_values(values: Mapping[str, Any]) -> JobSpec:
    """The job of ``values`` by field, of the right types; what is not named has its default."""
    own = {name: value for name, value in values.items() if name not in _SAMPLED}
    sampled = {name: value for name, value in values.items() if name in _SAMPLED}
    return JobSpec(sampling=Sampling(**sampled), **own)


def parse(fields: Mapping[str, str]) -> JobSpec:
    """Parse flat ``fields``; JobError names the first error in them."""
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise JobError(f"unknown job field {unknown[0][:60]!r}; the fields are {', '.join(FIELDS)}")
    for name, text in fields.items():
        _check_text(name, text)
    return _of_values({name: _read(fields, name) for name in FIELDS if name in fields})


def waiting_terms(fields: Mapping[str, str]) -> tuple[int, float]:
    """``priority`` and ``wait_seconds`` in flat ``fields``."""
    return _read(fields, "priority"), _read(fields, "wait_seconds")


def _check_text(name: str, text: str) -> None:
    most = _MOST_BYTES.get(name, MAX_FIELD_BYTES)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise JobError(
            "is not valid Unicode text: it holds half of a surrogate pair", name
        ) from None
    if size > most:
        raise JobError(f"is longer than {most} bytes: it has {size}", name)


def _read(fields: Mapping[str, str], name: str) -> Any:
    """The value of the field ``name``, its default if it is not there."""
    field = FIELDS[name]
    text = fields.get(name)
    if text is None:
        return field.default
    try:
        return field.kind.parse(text)
    except (ValueError, OverflowError, RecursionError):
        raise JobError(f"{name} is {text[:60]!r}; expected {field.kind.expected}") from None
