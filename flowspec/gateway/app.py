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
from flowspec.gateway.errors import ApiError, api_error, invalid
from flowspec.gateway.guard import ID_HEADER, Guard
from flowspec.gateway.routes import Gateway, gateway_of, router
from flowspec.gateway.serving import IGNORED_HEADER, ClientGone
from flowspec.gateway.settings import Settings

#: Status of an answer that nobody reads.
_CLIENT_GONE = 499
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


def create_app(settings: Settings) -> FastAPI:
    """The application of a gateway to the pipeline at the broker that ``settings`` name."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = Gateway(settings)
        try:
            yield
        finally:
            await app.state.gateway.close()

    app = GatewayApp(title="FlowSpec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Guard, keys=settings.keys, most_body=settings.most_body)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=[ID_HEADER, IGNORED_HEADER, "Retry-After"],
        )
    return app


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """An error that was raised on purpose."""
    assert isinstance(error, FlowSpecError)
    gateway = gateway_of(request)
    answer = api_error(error, gateway.capacity.retry_seconds)
    gateway.metrics.count("flowspec:requests_failed_total", status=str(answer.status))
    return _answer(answer)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _answer(invalid(error.errors()))


async def _http(request: Request, error: Exception) -> Response:
    """A path, a method or a body that the framework refuses."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # raised while the body was read
        return _answer(error.__cause__)
    text = _SAID.get(error.status_code, error.detail)
    code = "not_found" if error.status_code == 404 else None
    return _answer(ApiError(error.status_code, text, code=code, headers=error.headers))


async def _gone(request: Request, error: Exception) -> Response:
    gateway_of(request).metrics.count("flowspec:requests_cancelled_total")
    return Response(status_code=_CLIENT_GONE)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    FlowSpecError: _failed,
    RequestValidationError: _invalid,
    HTTPException: _http,
    ClientGone: _gone,
}
