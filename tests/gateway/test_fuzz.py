"""Requests made from the description of the paths: none of them gets a 500, or no answer."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.gateway.conftest import MODEL

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models/{name}", "/metrics")


def narrowed(description: dict[str, Any]) -> dict[str, Any]:
    """The description with the one model that is served, and short answers."""
    for schema in description["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if "model" in fields:
            fields["model"] = {"const": MODEL}
        for name in fields.keys() & {"max_tokens", "max_completion_tokens"}:
            fields[name] = {"type": "integer", "minimum": 1, "maximum": 8}
        if "wait_seconds" in fields:  # a job that begins too late for a short one is a clock's 503
            fields["wait_seconds"] = {"type": "number", "minimum": 60, "maximum": 3600}
        if "max_tokens" in fields:  # without it an answer may be as long as the context
            schema["required"] = [*schema.get("required", ()), "max_tokens"]
    return description


def fuzz(web: httpx2.Client, path: str, examples: int) -> None:
    description = narrowed(web.get("/openapi.json").json())
    schema = schemathesis.openapi.from_dict(description)
    (method,) = description["paths"][path]
    operation = schema[path][method.upper()]

    @settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def run(case: Any) -> None:
        case.call_and_validate(base_url=str(web.base_url), checks=CHECKS, timeout=120)

    run()


#: Values that are wrong in ways a schema does not think of.
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    (
        *("messages", "prompt", "n", "stop", "seed", "stream", "stream_options", "max_tokens"),
        *("temperature", "top_p", "top_k", "logit_bias", "response_format", "strategy", "tools"),
        *("user", "model"),
    )
)


def odd_requests(web: httpx2.Client, examples: int) -> None:
    statuses: set[int] = set()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(FIELDS, ODD, max_size=4), st.booleans())
    def run(more: dict[str, Any], chat: bool) -> None:
        said = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        request = {"model": MODEL, "max_tokens": 2, **said, **more}
        # As Python writes it: with NaN and infinities, which are no JSON.
        body = json.dumps(request).encode()
        answer = web.post(path, content=body, headers={"content-type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (request, answer.text)

    run()
    assert statuses >= {200, 400}


@pytest.mark.parametrize("path", PATHS)
def test_no_request_gets_a_500(web: httpx2.Client, path: str) -> None:
    fuzz(web, path, 25)


def test_no_odd_value_gets_a_500(web: httpx2.Client) -> None:
    odd_requests(web, 100)


@pytest.mark.heavy
@pytest.mark.parametrize("path", PATHS)
def test_no_request_of_many_gets_a_500(web: httpx2.Client, path: str) -> None:
    fuzz(web, path, 500)


@pytest.mark.heavy
def test_no_odd_value_of_many_gets_a_500(web: httpx2.Client) -> None:
    odd_requests(web, 3000)
