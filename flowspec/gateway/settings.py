"""How a gateway is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.run.fields import DEFAULT_STRATEGY
from flowspec.errors import ConfigError
from flowspec.gateway.hosts import ANY, host_name
from flowspec.gateway.keys import ApiKeys

#: Answers under way at once, if nothing else is said.
MOST_OPEN = 256
#: Connections at once, if nothing else is said: half of the files that a process may usually open.
MOST_CONNECTIONS = 512
#: How long answers under way may take to end of themselves once the server is asked to stop, while
#: its pipeline stops with it and while that serves on, seconds; then they end with an error.
FINISH_SECONDS = 3.0
DRAIN_SECONDS = 30.0
#: How often it is asked whether to stop, seconds.
WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a gateway.

    ``url``: the broker. ``name``: the model's name for clients; empty: by the target's.
    ``strategy``: of requests that name none. ``most_open``: answers under way at once, each choice
    counted; more requests get 429. ``most_body``: largest body of a request, bytes. ``origins``:
    web pages that a browser lets use the gateway, beside its own page. ``default_tokens``: most
    tokens of a chat answer whose request does not say; None: what fits into the context.
    ``most_connections``: open at once. ``hosts``: names under which the gateway is served beside
    this machine's own; none: any, unless only this machine reaches it and it has no keys.
    ``allowed_strategies``: what requests may name; none: the exact ones without a barrier.
    """

    url: str
    keys: ApiKeys = field(default_factory=ApiKeys)
    name: str = ""
    strategy: str = DEFAULT_STRATEGY
    most_open: int = MOST_OPEN
    most_body: int = 4 << 20
    origins: tuple[str, ...] = ()
    default_tokens: int | None = None
    most_connections: int = MOST_CONNECTIONS
    hosts: tuple[str, ...] = ()
    allowed_strategies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag, count in (
            ("--most-answers", self.most_open),
            ("--default-tokens", self.default_tokens),
            ("--most-connections", self.most_connections),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"{flag} is {count}; expected 1 or more")
        self._check_addresses()

    def _check_addresses(self) -> None:
        for host in self.hosts:
            if host != ANY and host_name(host) != host.lower().removesuffix("."):
                raise ConfigError(
                    f"--allowed-host is {host!r}; expected a name like chat.example.org, or *"
                )
        for origin in self.origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    f"--cors-origin is {origin!r}; expected an address like "
                    "https://chat.example.org, or *"
                )
