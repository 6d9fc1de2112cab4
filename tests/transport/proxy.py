"""A proxy in front of a broker that can lose replies and refuse commands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

#: Commands by which a client connects, which are never refused.
_HANDSHAKE = {b"AUTH", b"CLIENT", b"HELLO", b"INFO", b"SELECT"}


class Proxy:
    """Forward bytes, of new connections to ``target``, a unix socket or a TCP address.

    ``lose_replies(n)`` drops the next n replies and closes their connections. ``refuse(answer, n)``
    has the server answer ``answer`` to the next n commands or transactions that are no handshake,
    without carrying them out; if there are any names in ``only``, to commands of these.
    """

    def __init__(self, target: str | tuple[str, int], path: Path) -> None:
        self.target = target
        self._to_lose = 0
        self.to_refuse = 0
        self.only: tuple[bytes, ...] = ()
        self._refusal = ""
        self.lost = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_replies(self, count: int) -> None:
        self._to_lose = count

    def refuse(self, answer: str, count: int) -> None:
        self._refusal = answer
        self.to_refuse = count

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connected()
            except OSError:  # to the client, too, nobody is there
                client.close()
                continue
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _connected(self) -> socket.socket:
        if not isinstance(self.target, str):
            return socket.create_connection(self.target)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self.target)
        except OSError:
            server.close()
            raise
        return server

    def _replaced(self, data: bytes) -> bytes:
        """The whole commands in ``data``, those to be refused as commands that are answered so."""
        sent = b""
        is_aborted = False
        for command, raw in _commands(data):
            name = command[0].upper()
            if name == b"EXEC" and is_aborted:
                sent += _answering("EXECABORT Transaction discarded because of previous errors.")
                is_aborted = False
            elif name == b"MULTI" and self.to_refuse:
                self.to_refuse -= 1
                sent += _answering("OK", "status_reply")
                is_aborted = True
            elif is_aborted:
                sent += _answering(self._refusal)
            elif self.to_refuse and (name in self.only or not self.only) and name not in _HANDSHAKE:
                self.to_refuse -= 1
                sent += _answering(self._refusal)
            else:
                sent += raw
        return sent

    def _pump(self, source: socket.socket, sink: socket.socket, reply: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                handshake = not data.replace(b"+OK\r\n", b"")
                if reply and self._to_lose and not handshake:
                    self._to_lose -= 1
                    self.lost += 1
                    break
                if not reply and self.to_refuse:
                    while not _is_whole(data):
                        data += source.recv(1 << 16)
                    data = self._replaced(data)
                sink.sendall(data)
        except OSError:
            return
        finally:
            for end in (source, sink):
                with_shutdown(end)

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            with_shutdown(end)
            end.close()


def with_shutdown(end: socket.socket) -> None:
    """Wake the reader of ``end``."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _commands(data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
    """The commands in ``data``, each with its bytes; ValueError if one is cut off."""
    at = 0
    while at < len(data):
        began = at
        end = data.index(b"\r\n", at)
        count, at = int(data[at + 1 : end]), end + 2
        parts = []
        for _ in range(count):
            end = data.index(b"\r\n", at)
            length = int(data[at + 1 : end])
            parts.append(data[end + 2 : end + 2 + length])
            at = end + 2 + length + 2
        if at > len(data):
            raise ValueError("a command is cut off")
        yield parts, data[began:at]


def _is_whole(data: bytes) -> bool:
    try:
        return bool(list(_commands(data)))
    except ValueError:
        return False


def _answering(answer: str, kind: str = "error_reply") -> bytes:
    """A command that is answered by ``answer``."""
    parts = [b"EVAL", f"return redis.{kind}(ARGV[1])".encode(), b"0", answer.encode()]
    body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % len(parts) + body
