"""A page of another site does not reach a gateway by a name that it has made this machine's."""

from __future__ import annotations

import httpx2
import pytest

from flowspec.errors import ConfigError
from flowspec.gateway.hosts import allowed_hosts
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.settings import Settings
from flowspec.transport.connections.server import PrivateBroker
from tests.gateway.conftest import gateway_at

OWN = (
    "localhost",
    "localhost:8000",
    "LOCALHOST",
    "a.localhost:1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "",
)
OTHER = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example")
BROKEN = ("a b", "x@localhost", "localhost:port", "localhost/a", "[::1")


def test_own_names_are_served_and_others_are_not() -> None:
    hosts = allowed_hosts((), guarded=True)
    assert all(hosts.allow(name) for name in OWN)
    assert not any(hosts.allow(name) for name in (*OTHER, *BROKEN))


def test_names_that_are_given_are_served_too() -> None:
    hosts = allowed_hosts(("Chat.Example",), guarded=False)
    assert all(hosts.allow(name) for name in (*OWN, "chat.example:443", "CHAT.example."))
    assert not any(hosts.allow(name) for name in OTHER)


def test_any_name_is_served_where_nothing_is_to_be_guarded() -> None:
    for hosts in (allowed_hosts((), guarded=False), allowed_hosts(("*",), guarded=True)):
        assert all(hosts.allow(name) for name in (*OWN, *OTHER))


@pytest.mark.parametrize("name", ["http://chat.example", "chat.example:80", "", "a b"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host is"):
        Settings("redis://", hosts=(name,))


def test_a_gateway_of_this_machine_alone_is_guarded(
    web: httpx2.Client, broker: PrivateBroker, endless: None
) -> None:
    evil = {"host": "evil.example"}
    for path in ("/", "/health", "/v1/models"):
        refused = web.get(path, headers=evil)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "host_not_allowed"
    with gateway_at(Settings(broker.url, hosts=("evil.example",))) as named:
        assert named.get("/v1/models", headers=evil).status_code == 200
    with gateway_at(Settings(broker.url, keys=ApiKeys(["sk-test-key"]))) as keyed:
        assert keyed.get("/health", headers=evil).status_code == 200, (
            "keys are a guard of their own"
        )
