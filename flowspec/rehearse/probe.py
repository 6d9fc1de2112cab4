"""Measuring the boxes of a cluster before its pipeline exists: requests over the broker.

``python -m workers.probe`` on every box announces itself, waits for a request, measures and
answers; ``flowspec plan`` collects the answers. A request holds the models' configurations, so a
box needs no model. Keys, all with a lifetime: ``flowspec:probe:box:NAME`` (announcement),
``flowspec:probe:ask:NAME`` and ``flowspec:probe:reply:ID:NAME`` (lists).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowspec.errors import ClusterError, FlowSpecError
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.transport.connections.redis_client import BrokerClient

#: Lifetimes of an announcement, and of a request or an answer, seconds.
ANNOUNCED_SECONDS = 10
KEPT_SECONDS = 600
#: How long a box may take to measure, seconds.
MEASURING_SECONDS = 300.0
#: Round trips measured, and bytes of the bulk transfer.
PINGS = 200
BULK_BYTES = 8 << 20
_BULK_REPEATS = 3
_PREFIX = "flowspec:probe"
_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BoxReport:
    """What a box has measured.

    ``memory``: free bytes. ``seconds``: passes by rows, by name of what was timed. ``round_trip``:
    to the broker, seconds. ``bulk``: seconds of writing and reading ``BULK_BYTES`` there.
    ``device``: its torch device.
    """

    name: str
    memory: int
    seconds: Mapping[str, Mapping[str, float]]
    round_trip: float
    bulk: float
    device: str


Measure = Callable[[Mapping[str, Any]], tuple[int, Mapping[str, Mapping[int, float]]]]
"""Free bytes, and seconds by what was timed and rows, for a request."""


def link_seconds(client: BrokerClient, name: str) -> tuple[float, float]:
    """Median round trip to the broker, and median seconds of a bulk write and read there."""
    trips = [_timed(client, ("PING",)) for _ in range(PINGS)]
    key = f"{_PREFIX}:bulk:{name}"
    bulk = b"\x00" * BULK_BYTES
    moves = [
        _timed(client, ("SET", key, bulk, "EX", KEPT_SECONDS)) + _timed(client, ("GET", key))
        for _ in range(_BULK_REPEATS)
    ]
    client.run([("DEL", key)])
    return statistics.median(trips), statistics.median(moves)


def _timed(client: BrokerClient, command: tuple[Any, ...]) -> float:
    began = time.perf_counter()
    client.run([command])
    return time.perf_counter() - began


def mean_link(reports: Sequence[BoxReport]) -> LinkShape:
    """The mean link between two of the boxes, through the broker.

    A message goes half a round trip to the broker and half a round trip from it, and its bytes are
    written once and read once.
    """
    latency = statistics.fmean(report.round_trip for report in reports)
    seconds = statistics.fmean(report.bulk for report in reports)
    return LinkShape(latency, BULK_BYTES / seconds)


class ProbeServer:
    """Answers requests at the broker for the box ``name``, whose torch device is ``device``."""

    def __init__(self, client: BrokerClient, name: str, device: str, measure: Measure) -> None:
        self._client = client
        self._name = name
        self._device = device
        self._measure = measure

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until ``stop()`` is true."""
        while not stop():
            self.turn()

    def turn(self) -> None:
        """Announce the box; measure if there is a request."""
        self.announce()
        asked = self._client.run([("BLPOP", f"{_PREFIX}:ask:{self._name}", _WAIT_SECONDS)])[0]
        if asked is None:
            return
        request = json.loads(asked[1])
        reply = f"{_PREFIX}:reply:{request['id']}:{self._name}"
        answer = json.dumps(self._answer(request))
        self._client.run([("RPUSH", reply, answer), ("EXPIRE", reply, KEPT_SECONDS)])

    def announce(self) -> None:
        """Say that the box waits for a request."""
        key = f"{_PREFIX}:box:{self._name}"
        self._client.run([("SET", key, self._device, "EX", ANNOUNCED_SECONDS)])

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            memory, seconds = self._measure(request)
        except FlowSpecError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a box that cannot compute must answer so
            first = (str(error).splitlines() or [""])[0]
            return {"error": f"{type(error).__name__}: {first}"}
        trip, bulk = link_seconds(self._client, self._name)
        by_text = {
            what: {str(rows): one for rows, one in by_rows.items()}
            for what, by_rows in seconds.items()
        }
        return asdict(BoxReport(self._name, memory, by_text, trip, bulk, self._device))


def announced(client: BrokerClient) -> list[str]:
    """Names of the boxes that wait for a request."""
    prefix = f"{_PREFIX}:box:"
    keys = client.call(lambda redis: list(redis.scan_iter(match=f"{prefix}*", count=1000)))
    return sorted(key.decode(errors="replace").removeprefix(prefix) for key in keys)


def collect(
    client: BrokerClient,
    request: Mapping[str, Any],
    tell: Callable[[str], None] = lambda what: None,
    limit: float = MEASURING_SECONDS,
) -> list[BoxReport]:
    """The reports of every announced box on ``request``, which has an ``id`` of its own.

    ClusterError if no box is announced, or one does not answer within ``limit`` seconds. The boxes
    measure one after another, so that one machine may be several boxes.
    """
    names = announced(client)
    if not names:
        raise ClusterError(
            "no box waits at the broker; start `python -m workers.probe --name NAME` on each"
        )
    reports: list[BoxReport] = []
    for name in names:
        tell(f"measuring {name}, {len(reports) + 1} of {len(names)}")
        ask = f"{_PREFIX}:ask:{name}"
        client.run([("RPUSH", ask, json.dumps(request)), ("EXPIRE", ask, KEPT_SECONDS)])
        reports.append(_reply(client, name, str(request["id"]), limit))
    return reports


def _reply(client: BrokerClient, name: str, asked: str, limit: float) -> BoxReport:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        key = f"{_PREFIX}:reply:{asked}:{name}"
        found = client.run([("BLPOP", key, _WAIT_SECONDS)])[0]
        if found is not None:
            answer = json.loads(found[1])
            if "error" in answer:
                raise ClusterError(f"box {name} could not measure: {answer['error']}")
            return BoxReport(**answer)
    raise ClusterError(f"box {name} did not answer within {limit:g} s; look at its probe")
