"""The requests that the gateway takes: the fields it acts on, with their types and ranges.

Fields that are not here are either refused by name (``refusals``) or ignored; an answer's header
says which were ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flowspec.core.run.logprobs import MOST_ALTERNATIVES
from flowspec.core.run.sampling import MAX_SEED, MAX_TOP_K
from flowspec.core.run.spec import (
    MAX_FIELD_BYTES,
    MAX_NEW_TOKENS,
    MOST_PRIORITY,
    MOST_WAIT_SECONDS,
)
from flowspec.core.run.turns import MAX_TURNS

#: Most answers to one prompt, and most prompts of one request.
MAX_CHOICES = 16
MAX_PROMPTS = 64
#: Most alternatives to a token of a completion; OpenAI's.
MOST_TEXT_ALTERNATIVES = 5
#: Most stop strings, and most characters of one.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256


def _whole(value: object) -> object:
    """A whole number as such: JSON has one kind of numbers, and some clients write ``3.0``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unlimited(value: object) -> object:
    """-1 as the largest number: what clients send for as many tokens as there is room for."""
    return MAX_NEW_TOKENS if value == -1 else value


Tokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None,
    BeforeValidator(lambda value: _unlimited(_whole(value))),
]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Name = Annotated[str, Field(max_length=MAX_FIELD_BYTES)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]


class ApiRequest(BaseModel):
    """What all requests share: nothing is converted, unknown fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(ApiRequest):
    """``include_usage``: a last event with the usage."""

    include_usage: bool | None = None


class Sampled(ApiRequest):
    """What chat and completions share. Defaults are OpenAI's.

    ``model``: None: the one that is served. ``max_tokens`` -1: as many as fit.
    ``priority``: as vLLM's, the lowest begins first.
    """

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), BeforeValidator(_whole)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K), BeforeValidator(_whole)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED), BeforeValidator(_whole)] | None = (
        None
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    strategy: Name | None = None
    cache_salt: Name | None = None
    priority: (
        Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY), BeforeValidator(_whole)] | None
    ) = None
    wait_seconds: Annotated[float, Field(ge=0, le=MOST_WAIT_SECONDS)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one asks for nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(filter(None, given))


class ContentPart(ApiRequest):
    """A part of a message's content; only text is served."""

    type: Name
    text: str | None = None


class ChatMessage(ApiRequest):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None


class ChatRequest(Sampled):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: Tokens = None
    logprobs: bool | None = None
    top_logprobs: (
        Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), BeforeValidator(_whole)] | None
    ) = None


class CompletionRequest(Sampled):
    """A request to ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    logprobs: (
        Annotated[int, Field(ge=0, le=MOST_TEXT_ALTERNATIVES), BeforeValidator(_whole)]
        | Literal[False]
        | None
    ) = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of token ids."""
        given: Any = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)


class TokenizeRequest(ApiRequest):
    """A request to ``/tokenize``: a prompt, or messages to which the chat template is applied."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS)] | None = None
