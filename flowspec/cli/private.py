"""A pipeline for the length of one command: a running one, or a private one that ends with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flowspec.cli.show import Screen
from flowspec.cluster import Cluster, Setup
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.observe import note


@dataclass(frozen=True, slots=True)
class PipelineAt:
    """A pipeline's broker; ``check`` raises ClusterError if a process started here has stopped."""

    url: str
    check: Callable[[], None] = lambda: None


@contextlib.contextmanager
def pipeline_at(url: str | None, setup: Setup, screen: Screen) -> Iterator[PipelineAt]:
    """The pipeline at ``url``; None: a private one of ``setup``, stopped at the end."""
    if url is not None:
        yield PipelineAt(url)
        return
    cluster = Cluster(setup, say=note)
    try:
        with screen.starting() as progress:
            cluster.start(progress)
        yield PipelineAt(cluster.url, cluster.check)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        cluster.stop()


def check_after(error: FlowSpecError, check: Callable[[], None]) -> None:
    """ClusterError with its cause if ``error`` came from a process that has stopped."""
    try:
        check()
    except ClusterError as cause:
        raise ClusterError(f"{error.found}: {cause}") from None
