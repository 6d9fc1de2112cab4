"""A switch in user space between network namespaces: every packet takes one latency.

    python -m ops.hosts.switch [--latency-ms 5] HOSTS

Opens a TUN device per host and prints their names as one JSON list; who started it moves them into
the hosts' namespaces. Packets to 198.18.0.N go to host N, ``latency`` after they came, in order;
all others are dropped, as a switch drops what it has no port for. A line of standard input is a new
latency in milliseconds, for what comes from then on. Serves until standard input ends.

Unlike a relay it delays packets, not a connection's bytes: TCP's handshakes, acknowledgements and
windows cross the links, too. Needs Linux, and root for the devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ops.bench.arguments import count
from ops.parser import Parser

#: The hosts' network, which is set aside for benchmarks of networks (RFC 2544).
NETWORK = bytes([198, 18, 0])
#: Most bytes of a packet.
PACKET = 1 << 16
_DEVICES = Path("/dev/net/tun")
# Kernel constants of if_tun.h and prctl.h.
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PR_SET_TIMERSLACK = 29
_VERSION_4 = 4
#: Bytes of an IPv4 header up to the end of its destination.
_HEADER = 20


class Tun(NamedTuple):
    """An open TUN device: its name, and the file through which its packets pass."""

    name: str
    file: int

    @classmethod
    def open(cls) -> Tun:
        """A new device, which ends with its file; OSError without the right to make one."""
        file = os.open(_DEVICES, os.O_RDWR | os.O_NONBLOCK)
        asked = struct.pack("16sH22x", b"flowspec%d", _IFF_TUN | _IFF_NO_PI)
        given = fcntl.ioctl(file, _TUNSETIFF, asked)
        return cls(given[:16].rstrip(b"\0").decode(), file)


def host_of(packet: bytes) -> int:
    """The number of the host that a packet is for; 0: it is for none."""
    if len(packet) < _HEADER or packet[0] >> 4 != _VERSION_4 or packet[16:19] != NETWORK:
        return 0
    return packet[19]


class Delay:
    """Packets on their way, each with its host, delivered in the order in which they came."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self._waiting: deque[tuple[float, int, bytes]] = deque()

    def take(self, packet: bytes, now: float) -> None:
        """Take a packet for some host; another one is dropped."""
        host = host_of(packet)
        if host:
            self._waiting.append((now + self.latency, host, packet))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Remove and return what has arrived, with its hosts."""
        found = []
        while self._waiting and self._waiting[0][0] <= now:
            _, host, packet = self._waiting.popleft()
            found.append((host, packet))
        return found

    def left(self, now: float) -> float | None:
        """Seconds until the next packet arrives; None: none is on its way."""
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None


def packets(file: int) -> list[bytes]:
    """All packets that wait in a device."""
    found = []
    while True:
        try:
            found.append(os.read(file, PACKET))
        except BlockingIOError:
            return found


def serve(
    files: Sequence[int],
    orders: int,
    delay: Delay,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Pass packets between the devices ``files``, of hosts 1, 2, ..., until ``orders`` ends."""
    while True:
        ready, _, _ = select.select([*files, orders], [], [], delay.left(clock()))
        for file in ready:
            if file != orders:
                now = clock()
                for packet in packets(file):
                    delay.take(packet, now)
        for host, packet in delay.due(clock()):
            if host <= len(files):
                os.write(files[host - 1], packet)
        if orders in ready:
            given = os.read(orders, PACKET)
            if not given:
                return
            delay.latency = float(given.split()[-1]) / 1e3


def exact_timers() -> None:
    """Let this process wake at once when a wait ends, not up to 50 us later."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("hosts", type=count)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    given = parser.parse_args()
    try:
        tuns = [Tun.open() for _ in range(given.hosts)]
    except OSError as error:
        sys.exit(f"switch: no network device can be made: {error}")
    exact_timers()
    print(json.dumps([tun.name for tun in tuns]), flush=True)
    serve([tun.file for tun in tuns], sys.stdin.fileno(), Delay(given.latency_ms / 1e3))


if __name__ == "__main__":
    main()
