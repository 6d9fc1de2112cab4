"""Boxes measured for a plan: this machine as several workers, or every box that runs a probe."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from flowspec.model.memory import available_bytes
from flowspec.model.timing import time_request
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import Precision
from flowspec.model.weights.shapes import ModelShapes
from flowspec.plan.boxes import TimedBox
from flowspec.plan.drafts import PlannedDrafts
from flowspec.plan.measured import measured_box, request_for
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.rehearse.probe import BULK_BYTES, BoxReport, collect, link_seconds, mean_link
from flowspec.transport.connections.redis_client import BrokerClient
from flowspec.transport.connections.server import PrivateBroker

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is planned: the target's directory and shapes, its precision, its drafters."""

    directory: ModelDirectory
    shapes: ModelShapes
    precision: Precision
    drafts: PlannedDrafts


def local_boxes(
    what: Measuring, count: int, tell: Tell, device: str = "cpu"
) -> tuple[tuple[TimedBox, ...], LinkShape]:
    """``count`` workers on this machine, measured once: each has an equal share of its memory.

    A draft slows a stage only if there are not more cores than workers. The link is that through a
    private broker.
    """
    request = request_for(what.directory, what.precision, what.drafts)
    tell("measuring a layer on this machine")
    seconds = {
        part: {str(rows): one for rows, one in by_rows.items()}
        for part, by_rows in time_request(request, device).items()
    }
    with PrivateBroker() as broker:
        client = BrokerClient(broker.url)
        trip, bulk = link_seconds(client, "local")
        client.close()
    box = measured_box(
        "local",
        available_bytes(device) / count,
        seconds,
        request,
        what.shapes,
        what.precision,
        device=device,
        shared=1.0 if (os.cpu_count() or 1) > count else 2.0,
    )
    names = [f"local-{number}" for number in range(1, count + 1)]
    return tuple(replace(box, name=name) for name in names), LinkShape(trip, BULK_BYTES / bulk)


def probed_boxes(what: Measuring, url: str, tell: Tell) -> tuple[tuple[TimedBox, ...], LinkShape]:
    """Every box that waits at the broker at ``url``, and the mean of their links.

    Errors as ``collect``'s.
    """
    request = request_for(what.directory, what.precision, what.drafts)
    client = BrokerClient(url)
    try:
        reports = collect(client, request, tell)
    finally:
        client.close()

    def box(report: BoxReport) -> TimedBox:
        return measured_box(
            report.name,
            report.memory,
            report.seconds,
            request,
            what.shapes,
            what.precision,
            device=report.device,
        )

    return tuple(map(box, reports)), mean_link(reports)
