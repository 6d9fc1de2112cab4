"""Imports what all workers need, and forks them: ``python -m workers._fork_server FD``.

``FD`` is a socket of whole messages in JSON, the other end of ``flowspec.forks``. A request names a
module, its arguments, environment and log, and is answered by the child's pid; another one sends a
signal to a child; every end of a child is told with its status. When the socket is closed, the
server ends, and its children are killed with it.
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
from collections.abc import Mapping
from typing import Any

from flowspec.broker.server import die_with_parent

#: What workers import, but for the module that is run.
SHARED = (
    "flowspec.model.stage",
    "flowspec.model.sources",
    "flowspec.model.eagle",
    "flowspec.model.two_level",
    "workers._boot",
    "workers._models",
    "workers._wiring",
)
_MOST_BYTES = 1 << 20
_PR_SET_NAME = 15
#: Bytes of a process' name that Linux keeps.
_LONGEST_NAME = 15


def main() -> None:
    # One torch thread per process; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parent = socket.socket(fileno=int(sys.argv[1]))
    for name in SHARED:
        importlib.import_module(name)
    # Children then share these objects' memory: a collection would write to every one.
    gc.collect()
    gc.freeze()
    request = serve(parent)
    if request is not None:
        run(request)


def serve(parent: socket.socket) -> dict[str, Any] | None:
    """Answer requests until the socket is closed: None. In a child: the request it is for."""
    woken, waking = socket.socketpair()
    for end in (woken, waking):
        end.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([parent, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _tell_ends(parent, children)
        if parent not in readable:
            continue
        data = parent.recv(_MOST_BYTES)
        if not data:
            return None
        request = json.loads(data)
        if "signal" in request:
            if request["pid"] in children:
                os.kill(request["pid"], request["signal"])
            continue
        bind = die_with_parent()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (parent, woken, waking):
                end.close()
            bind()
            return dict(request)
        children.add(pid)
        parent.send(json.dumps({"started": pid}).encode())


def _tell_ends(parent: socket.socket, children: set[int]) -> None:
    for pid in sorted(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            parent.send(json.dumps({"ended": pid, "status": code}).encode())


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
    _name_process(request["module"])
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _name_process(name: str) -> None:
    """Have ``top`` and ``ps`` show the worker's module, not the fork server's."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, name.encode()[:_LONGEST_NAME], 0, 0, 0)


if __name__ == "__main__":
    main()
