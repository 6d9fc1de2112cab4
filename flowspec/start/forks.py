"""Worker processes forked from one that has imported what all of them need.

Importing torch and the library takes most of the seconds in which a worker starts, and the workers
of one machine share its cores. A fork server imports them once; its children begin where a worker
has finished importing. It is ``python -m flowspec.start.fork_server``, one for a process and
environment, and ends with the process that started it.

Where a fork is unsafe (systems other than Linux, machines with a CUDA device, whose driver does not
survive one) every worker is a process of its own from the start.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowspec.errors import ClusterError
from flowspec.transport.connections.server import die_with_parent

#: How long a fork server may take to start a process, seconds; the first one waits for its imports.
START_SECONDS = 120.0
#: Status of a process whose fork server is gone: it was killed with it.
_KILLED = -signal.SIGKILL
#: Devices whose drivers do not survive a fork: CUDA's, the same under WSL, and ROCm's.
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
#: Variables that no import reads, and that differ between pipelines.
_OWN = ("FLOWSPEC_", "PYTEST_CURRENT_TEST")
_MOST_BYTES = 1 << 20


class StartedProcess(Protocol):
    """A process that was started: what ``Cluster`` needs of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def send_signal(self, number: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        ...


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> StartedProcess:
    """Run ``python -m module`` in a session of its own, its output in ``log``.

    It is killed when this process ends. ClusterError if it cannot be started.
    """
    if can_fork():
        return _server(environment).start(module, arguments, environment, log)
    return spawn(module, arguments, environment, log)


def can_fork() -> bool:
    """Whether a process that has imported torch may fork here."""
    return sys.platform.startswith("linux") and not any(path.exists() for path in _DEVICES)


def spawn(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    before: Sequence[str] = (),
) -> StartedProcess:
    """As ``start``, by a new interpreter; ``before`` stands before its command."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(),
            start_new_session=True,
        )


class ForkServer:
    """The fork server ``module`` in ``environment``, which it keeps; safe for several threads."""

    def __init__(
        self, environment: Mapping[str, str], module: str = "flowspec.start.fork_server"
    ) -> None:
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._requests = 0
        self._gone = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server runs
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def is_gone(self) -> bool:
        """Whether the server has ended, and what it had started with it."""
        return self._gone

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> StartedProcess:
        """See ``start``."""
        request: dict[str, Any] = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": str(log),
        }
        with self._lock:
            self._requests += 1
            self._send(request | {"request": self._requests})
            return ForkedProcess(self, self._started())

    def _started(self) -> int:
        """The pid that answers the last request."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._gone:
            message = self._receive(deadline - time.monotonic())
            if message.get("request") != self._requests:
                self._note(message)
            elif "failed" in message:
                raise ClusterError(f"a worker cannot be started: {message['failed']}")
            else:
                pid = int(message["started"])
                self._statuses.pop(pid, None)  # of an earlier process with this number
                return pid
        raise ClusterError(f"the process that starts the workers {self._why()}")

    def _why(self) -> str:
        """Why there is no answer, with the last line that the server has printed."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        happened = "has stopped" if self._gone else f"did not answer in {START_SECONDS:g} s"
        return f"{happened}; it printed: {said}"

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process of this server that has not ended."""
        with self._lock:
            if not self._gone:
                self._send({"pid": pid, "signal": number})

    def status(self, pid: int, seconds: float) -> int | None:
        """The exit status of ``pid``, once it has ended within ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                while message := self._receive(0.0):
                    self._note(message)
                found = self._statuses.get(pid, _KILLED if self._gone else None)
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            time.sleep(min(left, 0.01))

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionError):
            self._gone = True
        except OSError as error:
            raise ClusterError(f"a worker cannot be started: {error}") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next message within ``seconds``; empty: none has come, or the server is gone."""
        if self._gone:
            return {}
        self._socket.settimeout(max(0.0, seconds))
        try:
            data = self._socket.recv(_MOST_BYTES)
        except (TimeoutError, BlockingIOError):
            return {}
        except OSError:
            data = b""
        self._gone = not data
        return dict(json.loads(data)) if data else {}

    def _note(self, message: Mapping[str, Any]) -> None:
        if "ended" in message:
            self._statuses[message["ended"]] = message["status"]
        elif "started" in message:  # whoever asked for it was interrupted
            self._send({"pid": message["started"], "signal": int(signal.SIGKILL)})

    def close(self) -> None:
        """Stop the server, and with it what it has started and still runs."""
        with self._lock:
            self._gone = True
            self._socket.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


class ForkedProcess:
    """A child of ``server``."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        return self._server.status(self.pid, 0.0)

    def terminate(self) -> None:
        self._server.signal(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        self._server.signal(self.pid, signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        self._server.signal(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        status = self._server.status(self.pid, float("inf") if timeout is None else timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status


_servers: dict[tuple[object, ...], ForkServer] = {}
_servers_lock = threading.Lock()


def _server(environment: Mapping[str, str]) -> ForkServer:
    """The running server for ``environment``; another one for what the imports may read."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_OWN)}
    key = (os.getpid(), str(Path.cwd()), *sorted(kept.items()))
    with _servers_lock:
        found = _servers.get(key)
        if found is not None and found.is_gone:
            found.close()
            found = None
        if found is None:
            found = _servers[key] = ForkServer(kept)
        return found


@atexit.register
def _close_all() -> None:
    for key, server in _servers.items():
        if key[0] == os.getpid():
            server.close()
