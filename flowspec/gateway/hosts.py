"""The names under which a gateway is served: a request's ``Host`` must be one of them.

A page of another site can have its own name resolved to this machine (DNS rebinding); to a browser
the gateway is then a part of that site. It cannot change the name that the browser sends.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

_LOCAL = "localhost"
#: Any name.
ANY = "*"
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


class AllowedHosts:
    """Names that requests may use, beside addresses; ``names`` empty: any."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        given = {_plain(name) for name in names}
        self._names = set() if ANY in given else given

    def allow(self, host: str) -> bool:
        """Whether a request with this ``Host`` header is served; empty: it has none."""
        if not self._names or not host:
            return True
        name = host_name(host)
        if name is None:
            return False
        if _is_address(name) or name == _LOCAL or name.endswith(f".{_LOCAL}"):
            return True  # no name of another site, whatever it resolves to
        return name in self._names


def allowed_hosts(names: Iterable[str], *, guarded: bool) -> AllowedHosts:
    """``names``, and the machine's own; without names any, unless ``guarded``."""
    given = tuple(names)
    return AllowedHosts((_LOCAL, *given)) if given or guarded else AllowedHosts()


def host_name(host: str) -> str | None:
    """The name in ``host``, without a port; None: it is no host."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # reading it is what checks it
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    name = _plain(parts.hostname or "")
    return name if _NAME.fullmatch(name) or _is_address(name) else None


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
