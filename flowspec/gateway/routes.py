"""The paths of the gateway."""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from flowspec.async_client import AsyncClient
from flowspec.errors import FlowSpecError
from flowspec.gateway import metrics
from flowspec.gateway.capacity import Capacity
from flowspec.gateway.choices import ChoiceRunner
from flowspec.gateway.errors import ApiError
from flowspec.gateway.keys import salt_of
from flowspec.gateway.pipeline import PipelineState, PipelineWatch
from flowspec.gateway.schema import ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from flowspec.gateway.serving import Answering
from flowspec.gateway.settings import Settings
from flowspec.gateway.wanted import RequestReader, tokenizing

#: What the answers that are errors look like, for the description of the paths.
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_SAID = {
    400: "The request cannot be served as it is.",
    401: "There is no API key, or a wrong one.",
    403: "The gateway is not served under that name.",
    404: "The model is not served here.",
    408: "The request did not come.",
    413: "The request is too large.",
    415: "The request is no JSON.",
    429: "Too many answers are under way.",
    500: "The job failed.",
    503: "The pipeline is not there.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "content": {"application/json": {"schema": _ERROR}}}
    for status, said in _SAID.items()
}
#: The page lets nothing in from elsewhere; its script and style are its own.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; img-src data:",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Gateway:
    """The parts that serve the paths, over one client of the pipeline."""

    def __init__(self, settings: Settings, figures: metrics.Metrics) -> None:
        self.client = AsyncClient(settings.url, follows=True)
        self.keys = settings.keys
        self.metrics = figures
        self.capacity = Capacity(settings.most_open)
        self.watch = PipelineWatch(self.client, settings.name)
        self.runner = ChoiceRunner(self.client, self.metrics, self.capacity)
        self.answering = Answering(self.runner, self.metrics)
        self.requests = RequestReader(settings)

    def end_answers(self) -> None:
        """Answer all that is under way with an error: the gateway stops."""
        self.client.end_waits("the gateway is stopping; send the request again")

    async def close(self) -> None:
        """End what is left, and close the connections."""
        await self.answering.close()
        await self.runner.ended.close()
        await self.watch.close()
        await self.client.close()


async def json_only(request: Request) -> None:
    """An error unless the request says that it is JSON.

    A web page elsewhere may send other types here without being asked whether it may.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, "send the request as JSON, with the header `Content-Type: application/json`"
        )


router = APIRouter(responses=ERRORS)
_JSON = [Depends(json_only)]


def salt_for(body: Sampled, request: Request) -> str:
    """The salt of the request's jobs."""
    keys = gateway_of(request).keys
    return salt_of(keys, request.headers.get("authorization", ""), body.cache_salt or "")


def gateway_of(request: Request) -> Gateway:
    """The gateway behind a request."""
    found: Gateway = request.app.state.gateway
    return found


@router.post("/v1/chat/completions", response_model=None, dependencies=_JSON)
async def chat(body: Annotated[ChatRequest, Body()], request: Request) -> Response:
    """The answer to a conversation, whole or streamed."""
    gateway = gateway_of(request)
    state = await gateway.watch.serving(body)
    wanted = gateway.requests.chat(body, state, salt_for(body, request))
    return await gateway.answering.answer(wanted, request)


@router.post("/v1/completions", response_model=None, dependencies=_JSON)
async def completions(body: Annotated[CompletionRequest, Body()], request: Request) -> Response:
    """Continuations of one or several prompts, whole or streamed."""
    gateway = gateway_of(request)
    state = await gateway.watch.serving(body)
    wanted = gateway.requests.completion(body, state, salt_for(body, request))
    return await gateway.answering.answer(wanted, request)


@router.post("/tokenize", response_model=None, dependencies=_JSON)
async def tokenize(body: Annotated[TokenizeRequest, Body()], request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    gateway = gateway_of(request)
    state = await gateway.watch.ready()
    gateway.watch.check_model(state, body.model)
    ids = await gateway.answering.token_ids(tokenizing(body, state), request)
    return JSONResponse({"count": len(ids), "max_model_len": state.context, "tokens": list(ids)})


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    """The one model that is served."""
    gateway = gateway_of(request)
    state = await gateway.watch.state()
    return JSONResponse({"object": "list", "data": [_card(gateway.watch, state)]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, request: Request) -> Response:
    """The model, by its name."""
    gateway = gateway_of(request)
    state = await gateway.watch.state()
    gateway.watch.check_model(state, name)
    return JSONResponse(_card(gateway.watch, state))


def _card(watch: PipelineWatch, state: PipelineState) -> dict[str, object]:
    name = watch.model(state)
    return {
        "id": name,
        "object": "model",
        "created": watch.created,
        "owned_by": "flowspec",
        "root": name,
        "parent": None,
        "max_model_len": state.context or None,
    }


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=None)
async def health() -> Response:
    """Whether this process answers."""
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=None)
async def ready(request: Request) -> Response:
    """Whether all workers of the pipeline are there."""
    state = await gateway_of(request).watch.ready()
    return JSONResponse({"status": "ready", "stages": state.stages})


@router.get("/metrics", response_model=None)
async def metrics_text(request: Request) -> Response:
    """All figures, in Prometheus' text format."""
    gateway = gateway_of(request)
    gauges: dict[str, float] = {
        "flowspec:open_answers": gateway.capacity.open,
        "flowspec:pipeline_ready": 0,
    }
    name = ""
    try:
        state = await gateway.watch.state()
        name = gateway.watch.model(state)
        running, waiting = await gateway.client.load()
        gauges["vllm:num_requests_running"] = running
        gauges["vllm:num_requests_waiting"] = waiting
        gauges["flowspec:pipeline_ready"] = float(not state.missing)
    except FlowSpecError:
        # A lost pipeline is a figure here, not an error: the others are still true.
        pass
    text = gateway.metrics.text(name, gauges)
    return Response(text, media_type=metrics.MEDIA_TYPE)


@router.get("/", response_model=None, include_in_schema=False)
async def page() -> Response:
    """The chat page."""
    text = resources.files("flowspec.gateway").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(text, headers=PAGE_HEADERS)
