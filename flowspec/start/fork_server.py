"""Imports what all workers need, and forks them: ``python -m flowspec.start.fork_server FD``.

``FD`` is a socket of whole messages in JSON, the other end of ``flowspec.start.forks``. A request
names a module, its arguments, environment and log, and is answered by the child's pid; another one
sends a signal to a child; every end of a child is told with its status. When the socket is closed,
the server ends, and its children are killed with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from flowspec.transport.connections.server import die_with_parent

#: What workers import, but for the module that is run.
SHARED = (
    "flowspec.model.stage",
    "flowspec.model.drafters.sources",
    "flowspec.model.drafters.eagle",
    "flowspec.start.boot",
    "flowspec.start.models",
    "flowspec.start.wiring",
)
#: Flags that say which of several equal workers one is.
_NUMBERED = ("--stage", "--model")
_MOST_BYTES = 1 << 20
_PR_SET_NAME = 15
#: Bytes of a process' name that Linux keeps.
_LONGEST_NAME = 15


def main() -> None:
    serve(SHARED, run)


def serve(modules: Iterable[str], become: Callable[[Mapping[str, Any]], None]) -> None:
    """Import ``modules`` and fork children, each of which calls ``become`` with its request."""
    # One torch thread per process; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parent = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # collections are a tenth of the imports' time
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    # Children then share these objects' memory: a collection would write to every one.
    gc.collect()
    gc.freeze()
    request = Server(parent).serve()
    if request is not None:
        status = 0
        try:
            become(request)
        except SystemExit as end:
            if not isinstance(end.code, int):
                raise
            status = end.code
        # Taking down an interpreter that has imported torch would take a second of CPU time.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Orphaned(Exception):
    """The process that started this one is gone."""


class Server:
    """Forks children for the process at the other end of ``parent``."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        self._children: set[int] = set()
        signal.set_wakeup_fd(self._waking.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> dict[str, Any] | None:
        """Answer requests until the parent is gone: None. In a child: the request it is for."""
        try:
            while True:
                readable, _, _ = select.select([self._parent, self._woken], [], [])
                if self._woken in readable:
                    self._woken.recv(4096)
                    self._tell_ends()
                if self._parent in readable:
                    request = self._request()
                    if "signal" in request:
                        self._signal(request)
                    elif self._is_child(request):
                        return request
        except _Orphaned:
            return None

    def _request(self) -> dict[str, Any]:
        data = self._parent.recv(_MOST_BYTES)
        if not data:
            raise _Orphaned
        return dict(json.loads(data))

    def _signal(self, request: Mapping[str, Any]) -> None:
        """Only to a child that is not reaped: another process may have the number of an old one."""
        if request["pid"] in self._children:
            os.kill(request["pid"], request["signal"])

    def _is_child(self, request: Mapping[str, Any]) -> bool:
        """Fork, and tell the parent how that went; whether this is the child."""
        bind = die_with_parent()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"request": request["request"], "failed": str(error)})
            return False
        if pid:
            self._children.add(pid)
            self._tell({"request": request["request"], "started": pid})
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._parent, self._woken, self._waking):
            end.close()
        bind()
        return True

    def _tell_ends(self) -> None:
        for pid in sorted(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._children.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                self._tell({"ended": pid, "status": code})

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            self._parent.send(json.dumps(message).encode())
        except ConnectionError:
            raise _Orphaned from None


def run(request: Mapping[str, Any]) -> None:
    """Become the worker that ``request`` names."""
    os.setsid()
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _name_process(role_of(request["module"], request["arguments"]))
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def role_of(module: str, arguments: Sequence[str]) -> str:
    """The role of a worker by its command, like ``draft`` or ``verify-2``."""
    role = module.rpartition(".")[2]
    number = next((at for flag, at in pairwise(arguments) if flag in _NUMBERED), "")
    return f"{role}-{number}" if number else role


def _name_process(name: str) -> None:
    """Have ``top`` and ``ps`` show the worker's role, not the fork server's module."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode()[:_LONGEST_NAME], 0, 0, 0)


if __name__ == "__main__":
    main()
