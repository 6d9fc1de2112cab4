"""The gateway as a server: its socket, its event loop, and its end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from flowspec.errors import ConfigError
from flowspec.gateway.keys import ApiKeys
from flowspec.gateway.settings import Settings

#: How long answers under way may take to end of themselves once the server is asked to stop, while
#: its pipeline stops with it and while that serves on, seconds; then they end with an error.
FINISH_SECONDS = 3.0
DRAIN_SECONDS = 30.0
#: How long they may take to be ended so, seconds.
_END_SECONDS = 2.0
#: How often it is asked whether to stop, seconds.
WATCH_SECONDS = 0.2
_STARTED_SECONDS = 0.01
_BACKLOG = 512
_LAST_PORT = 65535


def check_installed() -> None:
    """ConfigError unless the packages of the gateway are there."""
    try:
        import fastapi
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the gateway needs the package {error.name}; "
            "install it with `pip install 'flowspec[gateway]'`"
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
        sys.stderr.write(
            f"note: everyone who reaches {address_of(listening)} may use this model; "
            "--api-key-file asks for keys\n"
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
    import uvicorn

    from flowspec.gateway.app import create_app
    from flowspec.gateway.connections import IDLE_SECONDS, bounded

    app = create_app(settings, is_local=is_local(listening))
    config = uvicorn.Config(
        app,
        http=bounded(settings.most_connections),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(IDLE_SECONDS),
        timeout_graceful_shutdown=math.ceil(finish_seconds + _END_SECONDS),
        lifespan="on",
    )

    class Server(uvicorn.Server):
        """Of several signals the first one alone ends it: a second one must not cut answers off."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            signals.append(sig)
            if len(signals) == 1:
                super().handle_exit(sig, frame)

    signals: list[int] = []
    server = Server(config)

    def patience() -> float:
        """How long answers may take: who presses Ctrl-C, or asks twice, does not want to wait."""
        if len(signals) > 1:
            return 0.0
        return FINISH_SECONDS if signals == [signal.SIGINT] else finish_seconds

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(_STARTED_SECONDS)
        ready()
        while not (stop() or server.should_exit):
            await asyncio.sleep(WATCH_SECONDS)
        server.should_exit = True
        asked_at = time.monotonic()
        while time.monotonic() - asked_at < patience():
            await asyncio.sleep(min(WATCH_SECONDS, finish_seconds))
        app.state.gateway.end_answers()

    async def run() -> None:
        watching = asyncio.create_task(watch())
        try:
            await server.serve(sockets=[listening])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())
