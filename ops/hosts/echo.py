"""What a link takes, by round trips of a few bytes over TCP.

    python -m ops.hosts.echo ADDRESS

Listens at ADDRESS, prints the port, and returns all bytes of one connection after another until it
is stopped.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ops.hosts.network import Network, answer, piped
from ops.parser import Parser

#: Bytes of a round trip's message, about those of an envelope.
MESSAGE = bytes(200)
_SECONDS = 10.0


def connected(address: str, port: int) -> socket.socket:
    """A connection that sends at once."""
    found = socket.create_connection((address, port), _SECONDS)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def round_trip(connection: socket.socket, count: int, pause: float) -> float:
    """Median seconds of ``count`` round trips with ``pause`` seconds before each."""
    taken = []
    for _ in range(count):
        time.sleep(pause)
        began = time.monotonic()
        connection.sendall(MESSAGE)
        left = len(MESSAGE)
        while left:
            left -= len(connection.recv(left))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def one_way(network: Network, latency: float, count: int, logs: Path) -> float:
    """Seconds one way that ``latency`` adds to the network without any, at the same pace."""
    pause = 2 * latency
    with _echo(network, 2, logs) as connection:
        network.set_latency(latency)
        with_latency = round_trip(connection, count, pause)
        network.set_latency(0.0)
        without = round_trip(connection, count, pause)
    return max(0.0, with_latency - without) / 2


@contextlib.contextmanager
def _echo(network: Network, host: int, logs: Path) -> Iterator[socket.socket]:
    """A connection to a host that returns what it gets."""
    address = network.address(host)
    command = [*network.inside(host), sys.executable, "-m", "ops.hosts.echo", address]
    log = logs / "echo.log"
    with piped(command, log) as process, connected(address, int(answer(process, log))) as found:
        yield found


def serve(address: str) -> None:
    """Print the port, and return what comes."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                while given := connection.recv(len(MESSAGE)):
                    connection.sendall(given)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address")
    serve(parser.parse_args().address)


if __name__ == "__main__":
    main()
