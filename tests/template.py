"""Imports what commands need, and forks them: ``python -m tests.template FD``.

``tests.commands`` uses it. It is the fork server of the workers, whose children are commands: each
has files of its own in the folder that a request names as its log: ``in``, ``out`` and ``err``.
What a command starts by an interpreter of its own is forked from it as well.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import flowspec.cli
from flowspec.start.fork_server import SHARED, serve

_STREAMS = {"in": os.O_RDONLY, "out": os.O_WRONLY | os.O_CREAT, "err": os.O_WRONLY | os.O_CREAT}
_POPEN = subprocess.Popen
_MOST_DESCRIPTORS = 256


def main() -> None:
    commands = pkgutil.walk_packages(flowspec.cli.__path__, "flowspec.cli.")
    serve((*SHARED, *(module.name for module in commands)), run)


def run(request: Mapping[str, Any]) -> None:
    """Become the command that ``request`` names, as a new interpreter would."""
    for number, (name, flags) in enumerate(_STREAMS.items()):
        stream = os.open(Path(request["log"]) / name, flags)
        os.dup2(stream, number)
        os.close(stream)
    become(request["module"], request["arguments"], request["environment"])


def become(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run ``module`` as a program to the end of this process, whose memory is not torn down."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # by the program's own environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = Program  # type: ignore[misc,assignment]
    sys.argv = [module, *arguments]
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


class Program(_POPEN):  # type: ignore[type-arg]
    """``subprocess.Popen``, by a fork for a supervisor or a fork server: ``python -m MODULE``.

    Both have all output in one file and descriptors that they keep.
    """

    def __init__(self, command: Any, **options: Any) -> None:
        if command[:2] != [sys.executable, "-m"] or "pass_fds" not in options:
            super().__init__(command, **options)
            return
        self.args = command
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        self.pid = os.fork()
        if not self.pid:
            _, _, module, *arguments = command
            detach(options["stdout"], options["pass_fds"])
            become(module, arguments, options["env"])


def detach(output: IO[bytes], kept: Sequence[int]) -> None:
    """Be a session of its own with no open file but ``output`` and ``kept``."""
    os.setsid()
    atexit._clear()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    for first, end in itertools.pairwise([2, *sorted(kept), _MOST_DESCRIPTORS]):
        os.closerange(first + 1, end)


if __name__ == "__main__":
    main()
