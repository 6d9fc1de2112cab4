"""Hosts in network namespaces of this machine, with one latency between any two of them.

Host 1 is this process's own namespace; each further one is a namespace of its own that ends with
the process that holds it. Their only links are those of ``ops.hosts.switch``. Needs Linux and root.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.errors import ClusterError, ConfigError
from flowspec.transport.connections.server import die_with_parent
from ops.hosts.switch import NETWORK

#: Time limit of a command that sets up a device, seconds.
_COMMAND_SECONDS = 10.0
#: Until the switch has read a new latency.
_ORDERED_SECONDS = 0.2
_NEEDED = "expected root on Linux with /dev/net/tun, `ip`, `unshare` and `nsenter`"
#: Holds a new namespace until standard input ends.
_HOLD = ("unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat")


@dataclass(frozen=True, slots=True)
class Network:
    """Running hosts, numbered from 1.

    ``holders``: the processes in the namespaces of hosts 2, 3, ...
    """

    hosts: int
    holders: Sequence[subprocess.Popen[bytes]]
    switch: subprocess.Popen[bytes]

    def address(self, host: int) -> str:
        """The address of a host."""
        return ".".join(map(str, (*NETWORK, host)))

    def inside(self, host: int) -> tuple[str, ...]:
        """What stands before a command to run it on a host."""
        return () if host == 1 else ("nsenter", f"--net=/proc/{self.holders[host - 2].pid}/ns/net")

    def set_latency(self, seconds: float) -> None:
        """Delay each packet by ``seconds`` from now on."""
        assert self.switch.stdin is not None
        self.switch.stdin.write(f"{seconds * 1e3:g}\n".encode())
        self.switch.stdin.flush()
        time.sleep(_ORDERED_SECONDS)


def check() -> None:
    """ConfigError if this machine cannot have such hosts."""
    if not sys.platform.startswith("linux") or os.geteuid() or not Path("/dev/net/tun").exists():
        raise ConfigError(f"this machine has no network namespaces for hosts; {_NEEDED}")


@contextlib.contextmanager
def network(hosts: int, logs: Path) -> Iterator[Network]:
    """Run a network of ``hosts`` hosts, without latency at first. ConfigError as ``check``'s."""
    check()
    with contextlib.ExitStack() as stack:
        holders = []
        for host in range(2, hosts + 1):
            log = logs / f"host-{host}.log"
            holder = stack.enter_context(piped(_HOLD, log))
            answer(holder, log)
            holders.append(holder)
        log = logs / "switch.log"
        command = [sys.executable, "-m", "ops.hosts.switch", str(hosts)]
        switch = stack.enter_context(piped(command, log))
        running = Network(hosts, holders, switch)
        for host, device in enumerate(json.loads(answer(switch, log)), 1):
            if host > 1:
                _do("ip", "link", "set", device, "netns", str(holders[host - 2].pid))
            inside = running.inside(host)
            _do(*inside, "ip", "addr", "add", f"{running.address(host)}/24", "dev", device)
            _do(*inside, "ip", "link", "set", device, "up")
        yield running


@contextlib.contextmanager
def piped(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` until the end of the context, which ends its standard input."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            preexec_fn=die_with_parent(),
            start_new_session=True,
        )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def answer(process: subprocess.Popen[bytes], log: Path) -> bytes:
    """The first line that ``process`` prints; ClusterError if it ends without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ClusterError(
            f"a host's network did not start: {log.read_text(encoding='utf-8').strip()}; {_NEEDED}"
        )
    return line


def _do(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_SECONDS)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise ClusterError(f"`{' '.join(command)}` failed: {said}; {_NEEDED}") from None
