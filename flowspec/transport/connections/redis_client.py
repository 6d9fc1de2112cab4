"""Connections to one server: scripts by hash, and what becomes of them when it is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis

from flowspec.errors import BrokerError, BrokerUnreachable, ClientClosed
from flowspec.observe import logger
from flowspec.transport.connections.answers import Course, code_of, course_of, is_refused_for_now
from flowspec.transport.connections.connection import FIRST_SECONDS, connect, redact, retrying
from flowspec.transport.connections.scripts import load

#: How long a user who may not load scripts waits for them, and how often it looks, seconds.
SCRIPTS_SECONDS = 6.0
_SCRIPTS_TURN = 0.05

T = TypeVar("T")
Command = tuple[Any, ...]

#: The error of a call behind ``close``.
CLOSED = "this client is closed; make another one"


class BrokerClient:
    """A client with retries and scripts, for several threads.

    After a lost connection it compares the server's run id. A restarted server may have lost its
    data, or the end of it. Whoever asks for what is stored goes on with what there is; whoever has
    written and read in step with others begins anew (``_in_step``).
    """

    #: Whether what this client has read and written holds for one run of the server alone.
    _in_step = False

    def __init__(self, url: str) -> None:
        self.url = url
        self._redis = connect(url)
        self._broken = False
        self._closed = False
        self._server = retrying(self._ask_server, url, away_seconds=FIRST_SECONDS)

    def call(self, command: Callable[[redis.Redis], T]) -> T:
        """``command(client)``, retried as by ``retrying``; it may be sent twice."""
        return retrying(lambda: self._guarded(lambda: command(self._redis)), self.url)

    def _guarded(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise ClientClosed(CLOSED)
        if self._broken:
            server = self._ask_server()
            if server != self._server:
                self._note_restart(server)
            self._broken = False
        try:
            return call()
        except redis.RedisError as error:
            if course_of(error) is Course.RECONNECT:
                self._leave()
            raise

    def _leave(self) -> None:
        """Connect anew before the next call, perhaps to another server."""
        self._broken = True
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connections that nobody uses now: the next ones may lead to another server."""
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def _note_restart(self, server: str) -> None:
        where = redact(self.url)
        if self._in_step:
            raise BrokerUnreachable(f"the broker at {where} was restarted; what ran on it is lost")
        self._server = server
        logger().info("broker restarted", url=where)

    def once(self, command: Command) -> Any:
        """The reply to one command that must not be carried out twice.

        It is sent again only if the server has refused it for now. After BrokerUnreachable it is
        unknown whether it was carried out.
        """

        def send() -> list[Any]:
            # Before it is sent, a server that is away is waited for.
            retrying(lambda: self._guarded(lambda: None), self.url)
            return self._guarded(lambda: self._send([command], False))

        return retrying(send, self.url, while_=is_refused_for_now)[0]

    def run(self, commands: Sequence[Command], *, atomic: bool = False) -> list[Any]:
        """The replies to ``commands``, sent in order in one round trip; they may be sent twice.

        If the server lacks a script, all scripts are loaded and all commands sent again.
        ``atomic``: as one transaction, so that a blocked reader sees the effects of all or none.
        """
        if not commands:
            return []
        return retrying(lambda: self._guarded(lambda: self._send_known(commands, atomic)), self.url)

    def script(self, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
        """The reply of script ``name``."""
        return self.run([self.evalsha(name, keys, arguments)])[0]

    @staticmethod
    def evalsha(name: str, keys: Sequence[str], arguments: Sequence[object]) -> Command:
        """The command that calls script ``name``."""
        return ("EVALSHA", load()[name].sha, len(keys), *keys, *arguments)

    def _send_known(self, commands: Sequence[Command], atomic: bool) -> list[Any]:
        try:
            return self._send(commands, atomic)
        except redis.exceptions.NoScriptError:
            self.load_scripts()
            return self._send(commands, atomic)

    def load_scripts(self) -> None:
        """Load all scripts into the server; if this user may not, wait until the scheduler has."""
        try:
            for script in load().values():
                self._redis.script_load(script.text)
        except redis.exceptions.NoPermissionError:
            self._await_scripts()

    def _await_scripts(self) -> None:
        """Wait for the scripts, which the scheduler loads as soon as it misses one of its own."""
        wanted = [script.sha for script in load().values()]
        until = time.monotonic() + SCRIPTS_SECONDS
        while not all(self._redis.script_exists(*wanted)):
            if time.monotonic() > until:
                raise BrokerError(
                    f"the broker at {redact(self.url)} lacks FlowSpec's scripts, which this user "
                    "may not load; start the pipeline's scheduler, of the same version"
                )
            time.sleep(_SCRIPTS_TURN)

    def _send(self, commands: Sequence[Command], atomic: bool) -> list[Any]:
        if not atomic:
            return without_errors(self._exchange(commands))
        # A command that was refused before EXEC says more than what it makes of EXEC.
        *_, executed = without_errors(self._exchange(in_transaction(commands)))
        return without_errors(executed)

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to ``commands``, errors as values: raised, redis-py's quote the arguments."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        return list(pipeline.execute(raise_on_error=False))

    def _ask_server(self) -> str:
        info: Any = self._redis.info("server")
        return str(info["run_id"])

    def close(self) -> None:
        """Close the connections; every later call raises ClientClosed."""
        self._closed = True
        self._redis.close()
        self._disconnect()


class ConnectedClient(BrokerClient):
    """A client with a connection of its own beside the pool, for one thread.

    Its replies are as the server sends them (bytes, lists, integers).
    """

    _in_step = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection: Any = self._redis.connection_pool.get_connection()

    def _transmit(self, data: bytes) -> None:
        self._connection.send_packed_command([data], check_health=False)

    def _reply(self) -> Any:
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except BaseException as error:
            # Some answers are connection errors to redis-py, which would lose those behind them.
            if isinstance(error, redis.RedisError) and code_of(error):
                return error
            self._connection.disconnect()
            raise

    def _disconnect(self) -> None:
        """Close all connections; replies that have not come are not waited for."""
        self._connection.disconnect()
        super()._disconnect()


class DirectClient(ConnectedClient):
    """A client for one thread's hot path: one connection, no pool, no reply callbacks."""

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        self._transmit(pack(commands))
        return [self._reply() for _ in commands]


def in_transaction(commands: Sequence[Command]) -> list[Command]:
    """``commands`` as one transaction."""
    return [("MULTI",), *commands, ("EXEC",)]


def pack(commands: Sequence[Command]) -> bytes:
    """``commands`` in the Redis protocol, as one buffer for one system call.

    Takes a fifth of the time of redis-py's packer for the dozen short arguments of a hop.
    """
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for argument in command:
            data = argument if type(argument) is bytes else str(argument).encode()
            parts.append(b"$%d\r\n" % len(data))
            parts.append(data)
            parts.append(b"\r\n")
    return b"".join(parts)


def without_errors(answers: list[Any]) -> list[Any]:
    """``answers``; the first error among them is raised."""
    for answer in answers:
        if isinstance(answer, redis.RedisError):
            raise answer
    return answers
