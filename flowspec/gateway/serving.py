"""One answer: whole or as events, and its end when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from flowspec.core.run.spec import JobSpec
from flowspec.errors import FlowSpecError
from flowspec.gateway import sse
from flowspec.gateway.answers import AnswerForm, Body, usage_of
from flowspec.gateway.choices import ChoiceRunner, Finished, Output, TextPiece, joined
from flowspec.gateway.errors import api_error
from flowspec.gateway.metrics import Metrics

#: How long a stream waits for the first output before it begins without one, seconds: until then an
#: error can still be an answer with a status of its own.
FIRST_SECONDS = 10.0
#: Longest silence of a stream, seconds; a comment ends it.
SILENT_SECONDS = 10.0
#: The header with the fields of a request that had no effect.
IGNORED_HEADER = "x-flowspec-ignored"
#: The header of an answer whose text may differ from the model's own.
LOSSY_HEADER = "x-flowspec-lossy"

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection; nobody reads an answer."""


@dataclass(frozen=True, slots=True)
class WantedAnswer:
    """What a request asks for: the jobs of its choices, ``choices`` for each prompt in turn."""

    form: AnswerForm
    specs: Sequence[JobSpec]
    choices: int
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    ignored: str

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        said = {IGNORED_HEADER: self.ignored, LOSSY_HEADER: self.form.lossy}
        return {name: value for name, value in said.items() if value}


class Answering:
    """Answers requests by the jobs of ``runner``."""

    def __init__(self, runner: ChoiceRunner, metrics: Metrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self._ending: set[asyncio.Task[None]] = set()

    async def answer(self, wanted: WantedAnswer, request: Request) -> Response:
        """The answer to ``request``; ClientGone if nobody waits for it any more."""
        if wanted.stream:
            return await self._streamed(wanted, request)
        body = await while_connected(request, self._whole(wanted))
        return JSONResponse(body, headers=wanted.headers)

    async def _whole(self, wanted: WantedAnswer) -> Body:
        pieces: list[list[TextPiece]] = [[] for _ in wanted.specs]
        ends: dict[int, Finished] = {}
        async with aclosing(self._runner.outputs(wanted.specs, wanted.stops)) as outputs:
            async for output in outputs:
                match output:
                    case TextPiece(index):
                        pieces[index].append(output)
                    case Finished(index):
                        ends[index] = output
        said = [joined(index, found) for index, found in enumerate(pieces)]
        in_order = [ends[index] for index in range(len(said))]
        return wanted.form.whole(said, in_order, usage_of(in_order, wanted.choices))

    async def _streamed(self, wanted: WantedAnswer, request: Request) -> Response:
        stream = _Stream(wanted, self._runner.outputs(wanted.specs, wanted.stops), self._metrics)
        try:
            await while_connected(request, stream.settled(FIRST_SECONDS))
            stream.check()  # an error becomes an answer of its own
        except BaseException:
            self._abandon(stream)
            raise
        headers = {**sse.HEADERS, **wanted.headers}
        return _EventResponse(stream.events(), headers, lambda: self._leave(stream))

    def _leave(self, stream: _Stream) -> None:
        if not stream.is_ended:
            self._metrics.count("flowspec:requests_cancelled_total")
        self._abandon(stream)

    def _abandon(self, stream: _Stream) -> None:
        """End the jobs of ``stream`` that still run.

        In a task of its own: the caller's may be cancelled, and could not wait for it.
        """
        ending = asyncio.create_task(stream.close(), name="ending")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait until the jobs of all answers that were left have been told to end."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def token_ids(self, spec: JobSpec, request: Request) -> tuple[int, ...]:
        """The ids of the prompt of ``spec``; ClientGone as in ``answer``."""
        return await while_connected(request, self._runner.token_ids(spec))


class _Stream:
    """The events of one answer, of the ``outputs`` of its jobs."""

    def __init__(
        self, wanted: WantedAnswer, outputs: AsyncGenerator[Output, None], metrics: Metrics
    ) -> None:
        self._wanted = wanted
        self._outputs = outputs
        self._metrics = metrics
        self._ends: dict[int, Finished] = {}
        self._coming = asyncio.create_task(_next(outputs))
        #: Whether the last event, or an error, has been given out.
        self.is_ended = False

    async def settled(self, seconds: float) -> None:
        """Wait until the next output, or an error, has come; at most ``seconds``."""
        await asyncio.wait({self._coming}, timeout=seconds)

    def check(self) -> None:
        """Raise the error that came instead of an output, if one did."""
        if self._coming.done():
            self._coming.result()

    async def events(self) -> AsyncIterator[bytes]:
        """The events as they are sent; an error is one of them."""
        try:
            async for data in self._data():
                yield sse.event(data) if data else sse.PING
        except FlowSpecError as error:
            found = api_error(error)
            self._metrics.count("flowspec:requests_failed_total", status=str(found.status))
            yield sse.event(found.body)
        self.is_ended = True
        yield sse.DONE

    async def _data(self) -> AsyncIterator[Body]:
        """The data of the events; empty: nothing came for a while."""
        wanted = self._wanted
        form = wanted.form
        nothing: Body = {"usage": None} if wanted.include_usage else {}
        for index in range(len(wanted.specs) if form.chat else 0):
            yield form.begun(index) | nothing
        while len(self._ends) < len(wanted.specs):
            await self.settled(SILENT_SECONDS)
            if not self._coming.done():
                yield {}
                continue
            output = self._coming.result()
            self._coming = asyncio.create_task(_next(self._outputs))
            if isinstance(output, Finished):
                self._ends[output.index] = output
                yield form.ended(output) | nothing
            else:
                yield form.piece(output) | nothing
        if wanted.include_usage:
            in_order = [self._ends[index] for index in range(len(wanted.specs))]
            yield form.used(usage_of(in_order, wanted.choices))

    async def close(self) -> None:
        """End the jobs that still run; harmless at the end of the answer."""
        self._coming.cancel()
        await asyncio.gather(self._coming, return_exceptions=True)
        await self._outputs.aclose()


class _EventResponse(StreamingResponse):
    """A stream of events; ``end`` is called however it ends, even before its first event."""

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str], end: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type=sse.MEDIA_TYPE, headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, cancelled with ClientGone when the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    """Return when the client has closed the connection; the request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _next(outputs: AsyncGenerator[Output, None]) -> Output:
    return await anext(outputs)
