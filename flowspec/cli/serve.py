"""``flowspec serve``: a pipeline behind an OpenAI-compatible address, with a chat page."""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from flowspec.cli.places import lock_pipeline, note_running, state_file
from flowspec.cli.service import counted
from flowspec.cli.show import Screen
from flowspec.cluster import Cluster, Setup
from flowspec.errors import ClusterError
from flowspec.gateway.keys import ApiKeys, read_keys
from flowspec.gateway.pipeline import name_of
from flowspec.gateway.server import address_of, check_installed, listen, note_who_may_use
from flowspec.gateway.server import serve as serve_http
from flowspec.gateway.settings import Settings
from flowspec.observe import note


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """The flags of ``serve`` that are not the pipeline's; ``settings`` lack the broker's URL."""

    host: str
    port: int
    api_key_file: Path | None
    settings: Settings


def serve(setup: Setup, request: ServeRequest, url: str | None) -> None:
    """Start a pipeline and serve it until a signal ends both; ``url``: its broker."""
    check_installed()
    keys = read_keys(request.api_key_file) if request.api_key_file is not None else ApiKeys()
    with listen(request.host, request.port) as listening:
        note_who_may_use(listening, keys)
        _Service(setup, replace(request.settings, keys=keys), listening, url).run()


class _Service:
    """The pipeline and its gateway, under one pair of signals."""

    def __init__(
        self, setup: Setup, settings: Settings, listening: socket.socket, url: str | None
    ) -> None:
        self._setup = setup
        self._settings = settings
        self._listening = listening
        self._cluster = Cluster(setup, url=url, say=note)
        self._is_serving = False
        self._is_stopped = False

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        lock = _lock()
        try:
            with Screen(as_json=True).starting() as progress:
                self._cluster.start(progress)
            self._is_serving = True
            settings = replace(self._settings, url=self._cluster.url)
            if lock is not None:
                note_running(self._cluster.url, self._setup.target)
            serve_http(settings, self._listening, self._must_end, self._say_ready)
            if not self._is_stopped:
                raise ClusterError(self._cluster.reported)
        finally:
            self._is_serving = True  # a second signal must not leave processes behind
            self._cluster.stop()
            if lock is not None:
                state_file().unlink(missing_ok=True)
                lock.close()

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopped = True
        if not self._is_serving:
            raise KeyboardInterrupt

    def _must_end(self) -> bool:
        return self._is_stopped or not self._cluster.report()

    def _say_ready(self) -> None:
        name = self._settings.name or name_of(self._setup.target)
        address = address_of(self._listening)
        sys.stdout.write(
            f"serving {name} on {counted(self._setup.stages, 'stage')} at {address}/v1, "
            f"chat page at {address}/\n"
        )
        sys.stdout.flush()


def _lock() -> BinaryIO | None:
    """The lock with which `status`, `cancel` and others find this pipeline.

    None: they know another one, or, as a note says, none can be had.
    """
    try:
        return lock_pipeline()
    except OSError as error:
        note(f"other commands need --redis-url to find this pipeline: {error.strerror}")
        return None
