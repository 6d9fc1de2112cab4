"""Every error has OpenAI's form and the status that programs expect."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import SCHEDULER
from flowspec.core.protocol.machine import Finish, Received
from flowspec.core.protocol.messages import Envelope, Submit
from flowspec.core.run.key import RunKey
from flowspec.errors import (
    BrokerUnreachable,
    ClusterError,
    FlowSpecError,
    JobError,
    JobFailed,
    ProtocolError,
)
from flowspec.gateway.errors import api_error, invalid
from flowspec.gateway.schema import ApiRequest, ChatRequest, CompletionRequest
from flowspec.strategies import build
from tests.toy import limits


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (JobFailed("no such strategy", "refused"), 400, "invalid_request_error"),
        (JobFailed("the queue is full", "full"), 429, "rate_limit_error"),
        (JobFailed("the draft worker was lost", "lost"), 503, "service_unavailable_error"),
        (JobFailed("it did not begin in time", "late"), 503, "service_unavailable_error"),
        (JobFailed("a pass failed", "failed"), 500, "server_error"),
        (ClusterError("no scheduler"), 503, "service_unavailable_error"),
        (JobError("messages is empty"), 400, "invalid_request_error"),
        (ProtocolError("a hole"), 500, "server_error"),
    ],
)
def test_every_error_of_the_pipeline_has_its_status(
    error: FlowSpecError, status: int, kind: str
) -> None:
    found = api_error(error, retry_seconds=7)
    assert found.status == status
    body = found.body["error"]
    assert isinstance(body, dict)
    assert body.keys() == {"message", "type", "param", "code"}
    assert (body["message"], body["type"]) == (str(error), kind)
    later = {"full": "7", "late": "7"}.get(getattr(error, "cause", ""), "5")
    assert found.headers.get("Retry-After") == (later if status in (429, 503) else None)
    assert api_error(found) is found


def test_a_prompt_that_does_not_fit_has_openais_code() -> None:
    """The text is the draft worker's own."""
    machine = DraftMachine(limits(1), build)
    fields = (("prompt_ids", str([2] * 600)),)
    outputs = machine.step(Received((Envelope(SCHEDULER, 1, Submit(RunKey("j", 1), fields)),)), 0.0)
    (finish,) = [output for output in outputs if isinstance(output, Finish)]
    found = api_error(JobFailed(finish.error, finish.cause))
    assert (found.status, found.code) == (400, "context_length_exceeded")
    assert api_error(JobFailed("the model's context is moot", "refused")).code == "job_refused"


def test_what_does_not_fit_the_schema_is_named_without_its_value() -> None:
    given = {"messages": "my secret prompt", "n": 0, "seed": "x", "top_p": 2, "temperature": 9}
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(given)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    found = invalid(errors)
    assert found.param in ChatRequest.model_fields
    assert "(and 2 more)" in str(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("request_kind", "body", "says", "param"),
    [
        (CompletionRequest, {}, "prompt: it is missing", "prompt"),
        (CompletionRequest, {"prompt": {}}, "prompt: expected text or a list", "prompt"),
        (
            CompletionRequest,
            {"prompt": []},
            "prompt: expected text or a list of 1 or more",
            "prompt",
        ),
        (
            CompletionRequest,
            {"prompt": [-1]},
            "prompt[0]: expected text or 0 or more or a list",
            "prompt",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "stop": "\ud800"},
            "stop: expected text in valid Unicode or a list",
            "stop",
        ),
        (ChatRequest, {"messages": "hi"}, "messages: expected a list", "messages"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: expected text or a list",
            "messages",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text: expected text",
            "messages",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "robot"}], "n": 1.5},
            "n: expected a whole number; messages[0].role: expected 'system', 'developer', "
            "'user', 'assistant', 'tool' or 'function'",
            "n",
        ),
        (ChatRequest, [], "the body: expected an object", None),
    ],
)
def test_what_does_not_fit_is_one_plain_sentence(
    request_kind: type[ApiRequest], body: object, says: str, param: str | None
) -> None:
    with pytest.raises(ValidationError) as raised:
        request_kind.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in raised.value.errors()]
    found = invalid(errors)
    assert (str(found), found.param) == (says, param)


def test_the_brokers_address_is_not_told() -> None:
    found = api_error(BrokerUnreachable("cannot reach the broker at redis://10.0.0.7:6379"))
    assert found.status == 503
    assert "10.0.0.7" not in str(found)
    assert str(found) == "the pipeline's broker cannot be used now; try again later"
    assert found.headers == {"Retry-After": "5"}
