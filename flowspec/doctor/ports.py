"""Whether a broker can be reached, or a private one started, and how many files may be open."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flowspec.doctor.finding import Finding, error, ok, warning
from flowspec.errors import FlowSpecError
from flowspec.transport.connections.connection import redact

SUBJECT = "ports"
#: Longest wait for a connection, seconds; looking up a name may take the system longer.
CONNECT_SECONDS = 3.0
#: A worker needs a dozen files, and torch opens one a library and shard.
_FEW_FILES = 256
_DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt to connect: ``failure`` is empty if it worked, else the kind of failure.

    Kinds: ``name`` (unknown host), ``refused``, ``silent`` (no answer in time), ``missing`` (no
    such socket file), ``forbidden``, or the system's own words.
    """

    address: str
    failure: str
    seconds: float


def connect_to(url: str, *, seconds: float = CONNECT_SECONDS) -> Opened:
    """Connect to the address in ``url`` and disconnect at once."""
    parts = urlsplit(url)
    began = time.monotonic()
    if parts.scheme == "unix":
        path = unquote(parts.path)
        failure = _unix(path, seconds)
        return Opened(f"socket {path}", failure, time.monotonic() - began)
    host, port = parts.hostname or "localhost", parts.port or _DEFAULT_PORT
    try:
        socket.create_connection((host, port), seconds).close()
        failure = ""
    except OSError as failed:
        failure = _kind(failed)
    return Opened(f"{host}, port {port}", failure, time.monotonic() - began)


def _unix(path: str, seconds: float) -> str:
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(seconds)
        try:
            end.connect(path)
        except OSError as failed:
            return _kind(failed)
    return ""


def _kind(failed: OSError) -> str:
    match failed:
        case socket.gaierror():
            return "name"
        case TimeoutError():
            return "silent"
        case ConnectionRefusedError():
            return "refused"
        case FileNotFoundError():
            return "missing"
        case PermissionError():
            return "forbidden"
    return failed.strerror or type(failed).__name__


def check_opened(opened: Opened) -> Finding:
    """The finding on a connection to the broker's address."""
    where = f"the broker's address ({opened.address})"
    match opened.failure:
        case "":
            return ok(SUBJECT, f"{where} is open, in {opened.seconds * 1000:.1f} ms")
        case "name":
            found, remedy = "names no known host", "correct the URL, or the network's name server"
        case "refused":
            found = "refuses connections: nothing listens there"
            remedy = "start the server, or correct the URL; see `bind` in its configuration"
        case "silent":
            found = f"does not answer within {opened.seconds:.0f} s"
            remedy = "open the port in the firewalls between here and there, or correct the URL"
        case "missing":
            found, remedy = "does not exist", "start the server, or correct the URL"
        case "forbidden":
            found = "may not be used by this user"
            remedy = "let the user's group use it (`unixsocketperm`)"
        case other:
            found, remedy = f"cannot be reached: {other}", "check the network and the URL"
    return error(SUBJECT, f"{where} {found}", remedy)


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt to start a private broker; ``failure``: why it did not work."""

    binary: Path | None
    failure: FlowSpecError | None
    seconds: float


def check_started(started: Started) -> Finding:
    """The finding on a private broker."""
    if started.failure is None:
        return ok(
            SUBJECT,
            f"a private broker ({started.binary}) starts in {started.seconds:.2f} s; "
            "one is started for each run if no URL is given",
        )
    return error(
        SUBJECT,
        f"no private broker can be started: {redact(started.failure.found)}",
        redact(started.failure.remedy)
        or "give the URL of a running server by --redis-url or FLOWSPEC_REDIS_URL",
    )


def open_files() -> int:
    """How many files a process may have open; a large number if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def check_open_files(most: int) -> Iterator[Finding]:
    if most < _FEW_FILES:
        yield warning(
            SUBJECT,
            f"a process may have {most} files open; a worker with many shards needs more",
            "run `ulimit -n 4096` before starting workers",
        )
