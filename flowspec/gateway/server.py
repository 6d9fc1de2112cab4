"""Serve the gateway: its socket, who reaches it, and its event loop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable

from flowspec.errors import ConfigError, installs
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.settings import FINISH_SECONDS, Settings
from flowspec.observe import note

_BACKLOG = 512
_LAST_PORT = 65535


def check_installed() -> None:
    """ConfigError unless the packages of the gateway are there."""
    try:
        import fastapi
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the gateway needs the package {error.name}; install it with "
            f"`{installs('flowspec[gateway]')}`"
        ) from None
    assert fastapi and uvicorn


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; ConfigError if that is not possible.

    ``port`` 0: any free one.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(f"--port is {port}; expected 0 to {_LAST_PORT}")
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host is {host}, which has no address: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; choose another with --port, or stop what uses it"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listening


def address_of(listening: socket.socket) -> str:
    """Where ``listening`` is reached, as in a browser."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def is_local(listening: socket.socket) -> bool:
    """Whether only this machine reaches ``listening``."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def note_who_may_use(listening: socket.socket, keys: ApiKeys) -> None:
    """A note if everyone who reaches ``listening`` over a network may use it."""
    if not (keys or is_local(listening)):
        note(
            f"everyone who reaches {address_of(listening)} may use this model; "
            "--api-key-file asks for keys"
        )


def serve(
    settings: Settings,
    listening: socket.socket,
    stop: Callable[[], bool],
    ready: Callable[[], None] = lambda: None,
    finish_seconds: float = FINISH_SECONDS,
) -> None:
    """Serve on ``listening`` until ``stop()`` is true; call ``ready`` once requests are served.

    ``finish_seconds``: how long answers under way may take to end of themselves then.
    Signals also end it, and then reach the caller's handlers, which must not raise.
    """
    from flowspec.gateway.http_server import HttpServer

    server = HttpServer(
        settings, listening, stop, ready, finish_seconds, is_local=is_local(listening)
    )
    asyncio.run(server.run_to_end())
