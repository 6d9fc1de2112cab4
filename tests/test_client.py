"""The Python client's arguments: wrong types are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowspec.client import Client
from flowspec.errors import JobError


class Broker:
    """Stands for the connection; accepts every job."""

    def __init__(self, *_: object) -> None:
        self.sent: list[dict[str, str]] = []

    async def open(self) -> None:
        pass

    async def submit(self, fields: dict[str, str]) -> str:
        self.sent.append(fields)
        return "1-0"

    async def close(self) -> None:
        pass


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr("flowspec.async_client.AsyncRedisControl", lambda *_: broker)
    return broker


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": 5}, "prompt is 5; expected text"),
        ({"prompt_ids": 5}, "prompt_ids is 5; expected a list of token ids like [1, 2, 3]"),
        ({"prompt_ids": "12"}, "prompt_ids is '12'; expected a list of token ids like [1, 2, 3]"),
        ({"prompt_ids": [1, "2"]}, "prompt_ids is [1, '2']; expected a list"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; expected a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True; expected a whole number"),
        ({"temperature": "abc"}, "temperature is 'abc'; expected a number"),
        ({"temperature": None}, "temperature is None; expected a number"),
        ({"temperature": True}, "temperature is True; expected a number"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": 10**5000}, "temperature is of type int; expected a number"),
        ({"temperature": -1}, "temperature is -1.0; expected a number of 0"),
        ({"temperature": "a\nb" * 100}, "temperature is 'a"),
        ({"top_k": 2.5}, "top_k is 2.5; expected a whole number"),
        ({"top_p": "1"}, "top_p is '1'; expected a number"),
        ({"seed": 1.0}, "seed is 1.0; expected a whole number"),
        ({"strategy": 5}, "strategy is 5; expected text"),
        ({"idempotency_key": 5}, "idempotency_key is 5; expected text"),
        ({"messages": [], "prompt": None}, "messages is empty"),
        ({"messages": [{"role": "me", "content": "a"}], "prompt": None}, "roles are system, user"),
        ({"messages": [{"role": "user", "content": "a"}]}, "leave out one of them"),
        ({"raw": "no"}, "raw is 'no'; expected True or False"),
        ({"record": 0}, "record is 0; expected True or False"),
    ],
)
def test_a_wrong_argument_gets_one_clear_line(
    client: Client, broker: Broker, given: dict[str, Any], says: str
) -> None:
    prompt = {} if "prompt_ids" in given else {"prompt": "a"}
    with pytest.raises(JobError) as raised:
        client.submit(**{**prompt, **given})
    said = str(raised.value)
    assert says in said
    assert "\n" not in said
    assert len(said) < 200
    assert not broker.sent


def test_right_arguments_are_sent(client: Client, broker: Broker) -> None:
    client.submit(prompt_ids=[1, 2], temperature=1, top_k=3, top_p=0.5, seed=4, max_new_tokens=8)
    assert broker.sent == [
        {
            "prompt_ids": "[1, 2]",
            "max_new_tokens": "8",
            "temperature": "1.0",
            "top_k": "3",
            "top_p": "0.5",
            "seed": "4",
            "strategy": "auto",
        }
    ]
