"""The gateway's application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flowspec.errors import FlowSpecError
from flowspec.gateway.errors import ApiError, api_error, invalid, refused
from flowspec.gateway.guard import CLIENT_GONE, ID_HEADER, Guard
from flowspec.gateway.hosts import allowed_hosts
from flowspec.gateway.metrics import Metrics
from flowspec.gateway.routes import Gateway, gateway_of, router
from flowspec.gateway.serving import IGNORED_HEADER, LOSSY_HEADER, ClientGone
from flowspec.gateway.settings import Settings

_SAID = {404: "there is no such path here", 405: "this path does not take that method"}


class GatewayApp(FastAPI):
    """An application whose errors of validation have the form of all others."""

    def openapi(self) -> dict[str, Any]:
        """The description of the paths."""
        if self.openapi_schema is None:
            described = super().openapi()
            for operations in described.get("paths", {}).values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            self.openapi_schema = described
        return self.openapi_schema


def create_app(settings: Settings, *, is_local: bool = False) -> FastAPI:
    """The application of a gateway to the pipeline at the broker that ``settings`` name.

    ``is_local``: only this machine reaches it.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = Gateway(settings, metrics)
        try:
            yield
        finally:
            await app.state.gateway.close()

    app = GatewayApp(
        title="FlowSpec", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    hosts = allowed_hosts(settings.hosts, guarded=is_local and not settings.keys)
    app.add_middleware(
        Guard, keys=settings.keys, hosts=hosts, most_body=settings.most_body, metrics=metrics
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            # Clients have headers of their own; without cookies none of them opens a door.
            allow_headers=["*"],
            expose_headers=[ID_HEADER, IGNORED_HEADER, LOSSY_HEADER, "Retry-After"],
        )
    return app


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """An error that was raised on purpose."""
    assert isinstance(error, FlowSpecError)
    gateway = gateway_of(request)
    return _answer(api_error(error, gateway.capacity.retry_seconds))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(invalid(error.errors()))


async def _http(request: Request, error: Exception) -> Response:
    """A path, a method or a body that the framework refuses."""
    assert isinstance(error, HTTPException)
    match error.__cause__:  # raised while the body was read
        case ApiError() as own:
            return _answer(own)
        case UnicodeDecodeError():
            return _answer(refused("the request's body is not in UTF-8", code="invalid_json"))
        case RecursionError():
            return _answer(refused("the request's body is nested too deeply", code="invalid_json"))
        case ValueError():
            return _answer(refused("the request's body has too long a number", code="invalid_json"))
    text = _SAID.get(error.status_code, error.detail)
    code = "not_found" if error.status_code == 404 else None
    return _answer(ApiError(error.status_code, text, code=code, headers=error.headers))


async def _gone(request: Request, error: Exception) -> Response:
    gateway_of(request).metrics.count("flowspec:requests_cancelled_total")
    return Response(status_code=CLIENT_GONE)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    FlowSpecError: _failed,
    RequestValidationError: _invalid,
    HTTPException: _http,
    ClientGone: _gone,
}
