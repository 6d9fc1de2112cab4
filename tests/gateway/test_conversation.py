"""Messages become turns; what no turn can say is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.core.run.turns import Turn
from flowspec.gateway.conversation import turns_of_messages
from flowspec.gateway.errors import ApiError
from flowspec.gateway.schema import ChatMessage


def turns(*messages: dict[str, Any]) -> list[Turn]:
    return turns_of_messages([ChatMessage(**message) for message in messages])


def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = turns(
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "tool_calls": [], "refusal": None},
    )
    assert found == [Turn("system", "be brief"), Turn("user", "one\ntwo"), Turn("assistant", "")]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "tool", "content": "42"}, "messages[1].role is tool: this gateway serves no"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages[1].tool_calls is not supported",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[1].content has a part of type 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type 'text'"),
        ({"role": "user", "content": None}, "messages[1].content is missing; expected text"),
        ({"role": "assistant"}, "messages[1].content is missing; expected text"),
        ({"role": "user", "content": [{"type": "a\nb"}]}, "a part of type 'unknown'"),
    ],
)
def test_what_is_not_text_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as refused:
        turns({"role": "user", "content": "a"}, message)
    assert says in str(refused.value)
    assert refused.value.status == 400
