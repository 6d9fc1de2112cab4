"""How a gateway is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.run.spec import DEFAULT_STRATEGY
from flowspec.errors import ConfigError
from flowspec.gateway.keys import ApiKeys

#: Answers under way at once, if nothing else is said.
MOST_OPEN = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a gateway.

    ``url``: the broker. ``name``: the model's name for clients; empty: by the target's.
    ``strategy``: of requests that name none. ``most_open``: answers under way at once, each choice
    counted; more requests get 429. ``most_body``: largest body of a request, bytes. ``origins``:
    web pages that a browser lets use the gateway, beside its own page. ``default_tokens``: most
    tokens of a chat answer whose request does not say; None: what fits into the context.
    """

    url: str
    keys: ApiKeys = field(default_factory=ApiKeys)
    name: str = ""
    strategy: str = DEFAULT_STRATEGY
    most_open: int = MOST_OPEN
    most_body: int = 4 << 20
    origins: tuple[str, ...] = ()
    default_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.most_open < 1:
            raise ConfigError(f"--most-answers is {self.most_open}; expected 1 or more")
        if self.default_tokens is not None and self.default_tokens < 1:
            raise ConfigError(f"--default-tokens is {self.default_tokens}; expected 1 or more")
        for origin in self.origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    f"--cors-origin is {origin!r}; expected an address like "
                    "https://chat.example.org, or *"
                )
