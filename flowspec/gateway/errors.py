"""Errors in OpenAI's form, and which error of the pipeline is which of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.core.protocol import causes
from flowspec.errors import (
    BrokerError,
    ClusterError,
    ConfigError,
    FlowSpecError,
    JobFailed,
    WaitsEnded,
)
from flowspec.observe import logger

#: Seconds after which a client may try again when the pipeline is not there.
RETRY_SECONDS = 5
#: Errors of validation that one answer names.
_MOST_NAMED = 3

#: Where an error of validation is.
_Place = tuple[int | str, ...]
#: How pydantic names the kinds that a field may have, between the fields of a place.
_KIND = re.compile(r"str|int|float|bool|constrained-\w+|nullable|\S*\[.*")
#: What was expected, by pydantic's type of an error, with the bounds in its ``ctx``; others say it
#: in their message.
_EXPECTED = {
    "missing": "it is missing",
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "list_type": "expected a list",
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "string_unicode": "expected text in valid Unicode",
    "too_short": "expected a list of {min_length} or more",
    "too_long": "expected a list of at most {max_length}",
    "string_too_short": "expected text of {min_length} or more characters",
    "string_too_long": "expected text of at most {max_length} characters",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(FlowSpecError):
    """An answer that is an error. ``param``: the field that is wrong; ``code``: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        """The JSON object of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unavailable(
    message: str, code: str = "pipeline_unavailable", retry_seconds: int = RETRY_SECONDS
) -> ApiError:
    """The pipeline is not there, or not now."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(503, message, code=code, headers=headers)


def busy(message: str, retry_seconds: int) -> ApiError:
    """Too many requests."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(429, message, code="queue_full", headers=headers)


def api_error(error: FlowSpecError, retry_seconds: int = RETRY_SECONDS) -> ApiError:
    """``error`` as an answer."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case JobFailed(cause=causes.FULL):
            return busy(text, retry_seconds)
        case JobFailed(cause=causes.LATE):
            return unavailable(text, "late", retry_seconds)
        case JobFailed(cause=causes.TOO_LONG):
            return refused(text, code="context_length_exceeded")
        case JobFailed(cause=causes.REFUSED):
            return refused(text, code="job_refused")
        case WaitsEnded():
            return unavailable(text, "stopping")
        case BrokerError():
            # Its address is the operator's matter, not a client's.
            logger(role="gateway").warning("broker not usable", reason=text)
            return unavailable("the pipeline's broker cannot be used now; try again later")
        case JobFailed(cause=causes.LOST | causes.JOB_LOST) | ClusterError():
            return unavailable(text)
        case ConfigError():
            return refused(text)
        case _:
            return ApiError(500, text, code="job_failed")


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer to a request that does not fit its schema; ``errors`` as pydantic gives them.

    The values themselves are left out: they may be a prompt.
    """
    if errors[0]["type"] == "json_invalid":
        return refused("the request's body is not JSON", code="invalid_json")
    by_field: dict[object, list[tuple[_Place, str]]] = {}
    for error in errors:
        place = _place(error["loc"][1:])
        by_field.setdefault(place[0] if place else None, []).append((place, _expected(error)))
    said = [_sentence(found) for found in by_field.values()]
    more = len(said) - _MOST_NAMED
    rest = f" (and {more} more)" if more > 0 else ""
    first = next(iter(by_field))
    return refused(
        "; ".join(said[:_MOST_NAMED]) + rest,
        param=None if first is None else str(first),
        code="invalid_value",
    )


def _place(loc: Sequence[int | str]) -> _Place:
    """Fields and numbers in lists, without the kinds that a field may have."""
    return tuple(one for one in loc if isinstance(one, int) or not _KIND.fullmatch(one))


def _expected(error: Mapping[str, Any]) -> str:
    known = _EXPECTED.get(error["type"])
    if known is not None:
        return known.format(**error.get("ctx", {}))
    return f"expected {error['msg'].removeprefix('Input should be ')}"


def _sentence(found: Sequence[tuple[_Place, str]]) -> str:
    """What is wrong with one field, by the kind of value that it came closest to."""
    deepest = max((place for place, _ in found), key=len)
    what = list(dict.fromkeys(said for place, said in found if place == deepest))
    shown = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in deepest)
    others = "".join(f" or {said.removeprefix('expected ')}" for said in what[1:])
    return f"{shown.removeprefix('.') or 'the body'}: {what[0]}{others}"
