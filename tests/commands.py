"""``python -m MODULE ...`` as a user starts it, forked from a process that has imported torch once.

``tests/start/test_forks.py`` compares forked processes with new interpreters.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flowspec.start.forks import ForkServer, StartedProcess
from tests.waiting import SECONDS, until


@functools.cache
def _template() -> ForkServer:
    """One for this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOWSPEC_")}
    server = ForkServer(kept, "tests.template")
    atexit.register(server.close)
    return server


class Command:
    """A command that runs, with what it has printed so far; killed at the end of the block."""

    def __init__(self, words: tuple[str, ...], environment: Mapping[str, str], said: str) -> None:
        self.words = words
        self._folder = tempfile.TemporaryDirectory(prefix="fs-")
        self._place = Path(self._folder.name)
        (self._place / "in").write_text(said)
        module, *arguments = words
        self.process: StartedProcess = _template().start(
            module, arguments, environment, self._place
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SECONDS)
        self._folder.cleanup()

    @property
    def out(self) -> str:
        """What it has printed to stdout."""
        return self._printed("out")

    @property
    def err(self) -> str:
        """What it has printed to stderr."""
        return self._printed("err")

    def _printed(self, name: str) -> str:
        path = self._place / name
        return path.read_text() if path.exists() else ""

    def line(self, stream: str = "out") -> str:
        """The first line that it prints to ``stream``, once it has."""

        def found() -> str:
            line, end, _ = self._printed(stream).partition("\n")
            if not end:
                assert self.process.poll() is None, (self.words, self.out, self.err)
            return line + end

        return until(found)

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        status = self.process.wait(SECONDS)
        return subprocess.CompletedProcess(self.words, status, self.out, self.err)


def start(*words: str, environment: Mapping[str, str] | None = None, said: str = "") -> Command:
    """Start ``python -m words``; ``said``: its stdin; ``environment``: this process' by default."""
    return Command(words, os.environ if environment is None else environment, said)


def run(
    *words: str, environment: Mapping[str, str] | None = None, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """As ``start``, to its end."""
    with start(*words, environment=environment, said=said) as command:
        return command.ended()
