"""What is not served is refused by name; values that ask for nothing are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.gateway.errors import ApiError
from flowspec.gateway.refusals import REFUSED, check_refused, ignored_fields
from flowspec.gateway.schema import ChatRequest

ASKS = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "logit_bias": {"50256": -100},
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "best_of": 3,
    "echo": True,
    "modalities": ["audio"],
}


def request(**more: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], **more)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_field_is_refused_by_its_name_and_null_is_not(name: str) -> None:
    check_refused(request(**{name: None}))
    with pytest.raises(ApiError) as refused:
        check_refused(request(**{name: ASKS.get(name, "something")}))
    assert refused.value.status == 400
    assert refused.value.param == name
    assert str(refused.value).startswith(f"{name} is not supported: ")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_values_that_ask_for_nothing_are_accepted(name: str) -> None:
    for value in REFUSED[name][0]:
        check_refused(request(**{name: value}))
        if type(value) is int:
            check_refused(request(**{name: float(value)}))


@pytest.mark.parametrize(("name", "value"), [("echo", 0), ("presence_penalty", False)])
def test_a_value_of_another_type_is_not_taken_for_nothing(name: str, value: Any) -> None:
    with pytest.raises(ApiError):
        check_refused(request(**{name: value}))


def test_other_fields_are_ignored_and_named() -> None:
    found = request(user="me", metadata={"a": 1}, chat_id="x", tools=[], **{"bad name\r\n": 1})
    assert ignored_fields(found) == "user, metadata, chat_id"
    assert ignored_fields(request()) == ""
    many = request(**{f"field{at}": at for at in range(100)})
    assert ignored_fields(many).count(",") == 19
