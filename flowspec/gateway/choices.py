"""A request's choices as jobs of the pipeline: their texts as they come, and their ends."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from flowspec.async_client import AsyncClient, AsyncJob
from flowspec.core.run.spec import JobSpec
from flowspec.errors import FlowSpecError
from flowspec.gateway.capacity import Capacity
from flowspec.gateway.ended_requests import EndedRequests
from flowspec.gateway.errors import ApiError, unavailable
from flowspec.gateway.logprobs import PlacedToken, TokensOfText
from flowspec.gateway.metrics import Metrics, accepted_tokens
from flowspec.gateway.stop_strings import StopFilter
from flowspec.observe import logger
from flowspec.results import Chunk, Result, Stats

#: Pieces that are held for a slow reader. Further outputs wait in its jobs' feeds, whose bound is
#: the length of the answer.
_HELD = 256
#: OpenAI's names of the reasons for which a job ends by itself.
_FINISH = {"eos": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the text of choice ``index``, and the tokens that go with it, if asked for.

    One of the two may be empty.
    """

    index: int
    text: str
    tokens: tuple[PlacedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of choice ``index``.

    ``reason``: stop or length. ``accepted``: tokens that were guessed; None: not known. ``cached``:
    tokens of the prompt whose rows were kept of an earlier job, as far as is known.
    """

    index: int
    reason: str
    prompt_tokens: int
    tokens: int
    accepted: int | None
    cached: int = 0


Output = TextPiece | Finished


def joined(index: int, pieces: Sequence[TextPiece]) -> TextPiece:
    """All of a choice's ``pieces`` as one."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return TextPiece(index, "".join(piece.text for piece in pieces), tokens)


class ChoiceRunner:
    """Runs the jobs of requests on the pipeline of ``client``."""

    def __init__(self, client: AsyncClient, metrics: Metrics, capacity: Capacity) -> None:
        self._client = client
        self._metrics = metrics
        self._capacity = capacity
        self.ended = EndedRequests()

    async def outputs(
        self, specs: Sequence[JobSpec], stops: Sequence[str]
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one choice for each of ``specs``, as they come; the first error of any.

        Closing the iterator cancels what still runs.
        """
        arrived: asyncio.Queue[Output | FlowSpecError] = asyncio.Queue(_HELD)
        left = len(specs)
        with self._capacity.taken(left):
            choices = [
                asyncio.create_task(_Choice(self, index, spec, stops).run(arrived))
                for index, spec in enumerate(specs)
            ]
            try:
                while left:
                    output = await arrived.get()
                    if isinstance(output, FlowSpecError):
                        raise output
                    left -= isinstance(output, Finished)
                    yield output
            finally:
                for choice in choices:
                    choice.cancel()
                await asyncio.gather(*choices, return_exceptions=True)

    async def submit(self, spec: JobSpec) -> AsyncJob:
        """Submit ``spec``; if the caller is cancelled meanwhile, the job is ended."""
        submitting = asyncio.create_task(self._client.submit_spec(spec))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self.ended.end_submitted(submitting)
            raise

    async def token_ids(self, spec: JobSpec) -> tuple[int, ...]:
        """The ids of the prompt of ``spec``, a job that asks for them alone."""
        with self._capacity.taken(1):
            job = await self.submit(spec)
            try:
                return (await job.result()).prompt_token_ids
            finally:
                self.ended.end(job)

    def note_first(self, seconds: float) -> None:
        """Note the time to a first token."""
        self._metrics.observe("vllm:time_to_first_token_seconds", seconds)

    def note_more(self, seconds: float, tokens: int) -> None:
        """Note the time between two arrivals, the second of ``tokens`` tokens."""
        self._metrics.observe("vllm:inter_token_latency_seconds", seconds / tokens, tokens)

    async def finished(
        self, job: AsyncJob, index: int, stopped: bool, tokens: int, seconds: float
    ) -> Finished:
        """The end of ``job``, whose answer of ``tokens`` tokens took ``seconds``.

        ``stopped``: by a stop string. What the job decodes behind it is nobody's.
        """
        result = await job.so_far()
        reason = "stop" if stopped else _FINISH.get(result.finish_reason)
        if reason is None:
            raise unavailable(f"the job was {result.finish_reason}", "job_cancelled")
        self._count(result, reason, tokens, seconds)
        return Finished(
            index,
            reason,
            len(result.prompt_token_ids),
            tokens,
            None if stopped else accepted_tokens(result.stats),
            _cached(result.stats),
        )

    def _count(self, result: Result, reason: str, tokens: int, seconds: float) -> None:
        """Count an answer that has ended."""
        prompt = len(result.prompt_token_ids)
        metrics = self._metrics
        metrics.count("vllm:prompt_tokens_total", prompt)
        metrics.count("vllm:generation_tokens_total", tokens)
        metrics.count("vllm:prefix_cache_queries_total", prompt)
        metrics.count("vllm:prefix_cache_hits_total", _cached(result.stats))
        metrics.count("vllm:request_success_total", finished_reason=reason)
        metrics.observe("vllm:request_prompt_tokens", prompt)
        metrics.observe("vllm:request_generation_tokens", tokens)
        metrics.observe("vllm:e2e_request_latency_seconds", seconds)
        metrics.count_stats(result.stats)
        self._capacity.note(seconds)


def _cached(stats: Stats) -> int:
    """Tokens of the prompt whose rows were kept of an earlier job, as far as is known."""
    return stats.get("cached_tokens") or 0


class _Choice:
    """One choice of a request: its job, and the stop strings in its text."""

    def __init__(
        self, runner: ChoiceRunner, index: int, spec: JobSpec, stops: Sequence[str]
    ) -> None:
        self._runner = runner
        self._index = index
        self._spec = spec
        self._stops = StopFilter(stops)
        self._tokens = TokensOfText()
        self._starts: list[int] = []  # where the text of each token begins
        self._length = 0  # of the text read so far, characters
        self._began = time.monotonic()
        self._last: float | None = None

    async def run(self, out: asyncio.Queue[Output | FlowSpecError]) -> None:
        """Put the outputs of the choice into ``out``, or the error that ended it."""
        try:
            await self._run(out)
        except FlowSpecError as error:
            await out.put(error)
        except Exception as error:  # noqa: BLE001 - or its reader would wait for ever
            kind = type(error).__name__
            logger(role="gateway").error("choice failed", kind=kind)
            await out.put(ApiError(500, f"the gateway failed: {kind}"))

    async def _run(self, out: asyncio.Queue[Output | FlowSpecError]) -> None:
        job = await self._runner.submit(self._spec)
        try:
            async with aclosing(job.stream()) as chunks:
                async for chunk in chunks:
                    self._note(chunk)
                    if chunk.logprobs:
                        self._tokens.push(chunk.logprobs, chunk.sizes)
                    text = self._stops.push(chunk.text)
                    self._note_starts(chunk.sizes)
                    await self._pass_on(text, out)
                    if self._stops.end is not None:
                        break
            stopped = self._stops.end is not None
            if not stopped:
                await self._pass_on(self._stops.finish(), out, is_last=True)
            seconds = time.monotonic() - self._began
            ended = self._runner.finished(job, self._index, stopped, self._count(), seconds)
            await out.put(await ended)
        finally:
            self._runner.ended.end(job)

    async def _pass_on(
        self, text: str, out: asyncio.Queue[Output | FlowSpecError], *, is_last: bool = False
    ) -> None:
        tokens = self._tokens.passed(text)
        if is_last:
            tokens += self._tokens.rest()
        if text or tokens:
            await out.put(TextPiece(self._index, text, tokens))

    def _note_starts(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._starts.append(self._length)
            self._length += size

    def _count(self) -> int:
        """Tokens whose text does not begin behind a stop string, whenever that was found."""
        end = self._stops.end
        return len(self._starts) if end is None else bisect_left(self._starts, end)

    def _note(self, chunk: Chunk) -> None:
        now = time.monotonic()
        if self._last is None:
            self._runner.note_first(now - self._began)
        elif chunk.token_ids:
            self._runner.note_more(now - self._last, len(chunk.token_ids))
        self._last = now
