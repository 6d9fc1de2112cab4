"""The gateway's HTTP server, which lets the answers under way end before it does."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from flowspec.gateway.app import create_app
from flowspec.gateway.connections import IDLE_SECONDS, bounded
from flowspec.gateway.settings import FINISH_SECONDS, WATCH_SECONDS, Settings

#: How long answers may take to be ended with an error, seconds.
_END_SECONDS = 2.0
_STARTED_SECONDS = 0.01


class HttpServer(uvicorn.Server):
    """The server on ``listening``; its arguments are those of ``server.serve``.

    ``is_local``: whether only this machine reaches it.
    """

    def __init__(
        self,
        settings: Settings,
        listening: socket.socket,
        stop: Callable[[], bool],
        ready: Callable[[], None],
        finish_seconds: float,
        *,
        is_local: bool,
    ) -> None:
        self._app = create_app(settings, is_local=is_local)
        self._listening = listening
        self._stop = stop
        self._ready = ready
        self._finish_seconds = finish_seconds
        self._signals: list[int] = []
        super().__init__(
            uvicorn.Config(
                self._app,
                http=bounded(settings.most_connections),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=math.ceil(IDLE_SECONDS),
                timeout_graceful_shutdown=math.ceil(finish_seconds + _END_SECONDS),
                lifespan="on",
            )
        )

    async def run_to_end(self) -> None:
        """Serve until it is to stop."""
        watching = asyncio.create_task(self._watch())
        try:
            await self.serve(sockets=[self._listening])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of several signals the first one alone ends it: a second one must not cut answers off."""
        self._signals.append(sig)
        if len(self._signals) == 1:
            super().handle_exit(sig, frame)

    async def _watch(self) -> None:
        while not self.started:
            await asyncio.sleep(_STARTED_SECONDS)
        self._ready()
        while not (self._stop() or self.should_exit):
            await asyncio.sleep(WATCH_SECONDS)
        self.should_exit = True
        asked_at = time.monotonic()
        while time.monotonic() - asked_at < self._patience:
            await asyncio.sleep(min(WATCH_SECONDS, self._finish_seconds))
        self._app.state.gateway.end_answers()

    @property
    def _patience(self) -> float:
        """How long answers may take: who presses Ctrl-C, or asks twice, does not want to wait."""
        if len(self._signals) > 1:
            return 0.0
        return FINISH_SECONDS if self._signals == [signal.SIGINT] else self._finish_seconds
