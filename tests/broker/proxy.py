"""A proxy in front of a broker's unix socket that can lose replies."""

from __future__ import annotations

import socket
import threading
from pathlib import Path


class Proxy:
    """Forward bytes; ``lose_replies(n)`` drops the next n replies and closes their connections."""

    def __init__(self, target: str, path: Path) -> None:
        self._target = target
        self._to_lose = 0
        self.lost = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_replies(self, count: int) -> None:
        self._to_lose = count

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, reply: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                handshake = not data.replace(b"+OK\r\n", b"")
                if reply and self._to_lose and not handshake:
                    self._to_lose -= 1
                    self.lost += 1
                    break
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
