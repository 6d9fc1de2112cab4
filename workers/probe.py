"""A box that `flowspec plan` measures: ``python -m workers.probe --name NAME``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from flowspec.rehearse.probe import ProbeServer
from flowspec.start.boot import Process, parser, run
from flowspec.transport.connections.redis_client import BrokerClient


def main() -> None:
    arguments = parser("probe")
    arguments.add_argument(
        "--name", default=socket.gethostname(), help="the box's name in the plan (default: host)"
    )
    arguments.add_argument("--device", default="cpu", help="cpu, cuda or cuda:0 (default: cpu)")
    given = arguments.parse_args()
    process = Process(given.redis_url)
    client = BrokerClient(process.url)

    def measure(request: Mapping[str, Any]) -> tuple[int, Mapping[str, Mapping[int, float]]]:
        from flowspec.model.memory import available_bytes
        from flowspec.model.timing import time_request

        return available_bytes(given.device), time_request(request, given.device)

    ProbeServer(client, given.name, given.device, measure).run(lambda: process.stopped)
    client.close()


if __name__ == "__main__":
    run(main, "probe")
