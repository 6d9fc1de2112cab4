"""A checked request as jobs."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypedDict

from flowspec.core.run.fields import DEFAULT_MAX_NEW_TOKENS
from flowspec.core.run.sampling import MAX_SEED, Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.run.turns import checked_turns
from flowspec.gateway.answers import AnswerForm
from flowspec.gateway.conversation import turns_of_messages
from flowspec.gateway.errors import refused
from flowspec.gateway.pipeline import PipelineState, check_template
from flowspec.gateway.refusals import check_refused, ignored_fields
from flowspec.gateway.schema import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Sampled,
    TokenizeRequest,
)
from flowspec.gateway.serving import WantedAnswer
from flowspec.gateway.settings import Settings
from flowspec.gateway.strategies import ClientStrategies, lossy_mode

#: Tokens of a completion whose request does not say; OpenAI's.
COMPLETION_TOKENS = 16


class SharedTerms(TypedDict):
    """What all jobs of a request share, as in ``JobSpec``."""

    strategy: str
    cache_salt: str
    priority: int
    wait_seconds: float
    logprobs: int | None


class RequestReader:
    """Reads requests, by ``settings``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._strategies = ClientStrategies(settings.allowed_strategies, settings.strategy)

    def chat(self, request: ChatRequest, state: PipelineState, salt: str) -> WantedAnswer:
        """What a chat asks for; an error that names what is not served.

        ``salt``: of its jobs, as in ``JobSpec``.
        """
        check_refused(request)
        check_template(state)
        turns = checked_turns(tuple(turns_of_messages(request.messages)))
        most = (
            request.max_completion_tokens
            or request.max_tokens
            or self._settings.default_tokens
            or state.context
            or DEFAULT_MAX_NEW_TOKENS
        )
        terms = self._terms(request, salt, chat_alternatives(request))
        specs = [
            JobSpec(messages=turns, max_new_tokens=most, sampling=sampling, **terms)
            for sampling in samplings(request)
        ]
        return self._wanted(request, specs, _form(request, state, terms, chat=True))

    def completion(
        self, request: CompletionRequest, state: PipelineState, salt: str
    ) -> WantedAnswer:
        """What a request for completions asks for, as ``chat``."""
        check_refused(request)
        most = request.max_tokens or COMPLETION_TOKENS
        asked = request.logprobs
        terms = self._terms(request, salt, None if asked is False else asked)
        seeded = samplings(request)
        if len(request.prompts) * len(seeded) > MAX_PROMPTS:
            raise refused(
                f"{len(request.prompts)} prompts with {len(seeded)} answers each are more than "
                f"{MAX_PROMPTS} answers",
                "prompt",
            )
        specs = [
            JobSpec(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=None if isinstance(prompt, str) else tuple(prompt),
                max_new_tokens=most,
                sampling=sampling,
                raw=isinstance(prompt, str),
                **terms,
            )
            for prompt in request.prompts
            for sampling in seeded
        ]
        return self._wanted(request, specs, _form(request, state, terms, chat=False))

    def _terms(self, request: Sampled, salt: str, logprobs: int | None) -> SharedTerms:
        return SharedTerms(
            strategy=self._strategies.chosen(request.strategy),
            cache_salt=salt,
            # A job's highest priority begins first, a request's lowest.
            priority=-(request.priority or 0),
            wait_seconds=request.wait_seconds or 0.0,
            logprobs=logprobs,
        )

    @staticmethod
    def _wanted(request: Sampled, specs: Sequence[JobSpec], form: AnswerForm) -> WantedAnswer:
        options = request.stream_options
        return WantedAnswer(
            form=form,
            specs=specs,
            choices=request.n or 1,
            stops=request.stops,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            ignored=ignored_fields(request),
        )


def _form(request: Sampled, state: PipelineState, terms: SharedTerms, *, chat: bool) -> AnswerForm:
    return AnswerForm(
        str(request.model),
        state.fingerprint,
        chat,
        lossy=lossy_mode(terms["strategy"]),
        logprobs=terms["logprobs"] is not None,
    )


def chat_alternatives(request: ChatRequest) -> int | None:
    """How many alternatives to each token a chat asks for; None: no log-probabilities at all."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise refused("top_logprobs are returned with logprobs: set logprobs", "top_logprobs")
    return None


def tokenizing(request: TokenizeRequest, state: PipelineState) -> JobSpec:
    """The job that finds the ids of the request's prompt."""
    check_refused(request)
    if (request.prompt is None) == (request.messages is None):
        raise refused("give either a prompt or messages", "prompt")
    if request.messages is not None:
        check_template(state)
        turns = checked_turns(tuple(turns_of_messages(request.messages)))
        return JobSpec(messages=turns, max_new_tokens=1, tokenize=True)
    return JobSpec(prompt=request.prompt, max_new_tokens=1, raw=True, tokenize=True)


def samplings(request: Sampled) -> list[Sampling]:
    """The sampling of each choice: OpenAI's defaults, and a seed of its own."""
    # Any whole number of 64 bits is a seed for OpenAI's clients.
    first = secrets.randbits(63) if request.seed is None else request.seed & MAX_SEED
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0:  # the best token alone
        temperature, top_p = 0.0, 1.0
    top_k = max(0, request.top_k or 0)
    return [
        Sampling(temperature, top_k, top_p, (first + choice) & MAX_SEED)
        for choice in range(request.n or 1)
    ]
