"""What the software of a hop takes, by live workers that rest where a link would be."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flowspec.cluster import Setup
from flowspec.results import reported
from ops.hosts.network import Network
from ops.hosts.pipeline import pipeline, stage_roles

PLAIN = "autoregressive"
#: Tokens and jobs of one measurement.
TOKENS = 16
JOBS = 3


@contextlib.contextmanager
def resting(
    setup: Setup, network: Network, prompt: Sequence[int], folder: Path
) -> Iterator[Callable[[float], float]]:
    """Seconds of software per hop of plain decoding, by the seconds that a stage rests.

    A token takes one hop more than there are stages. What it takes beyond rests and passes, over a
    network without latency, is software: codec, machines, writes, the servers and the wake-ups.
    """
    file = folder / "rest"
    file.write_text("0", encoding="utf-8")
    program = ("ops.hosts.resting_stage", "--rest", str(file))
    with pipeline(setup, network, dict.fromkeys(stage_roles(setup), program)) as client:

        def hop(seconds: float) -> float:
            file.write_text(f"{seconds}", encoding="utf-8")
            found: list[float] = []
            for _ in range(JOBS):
                job = client.submit(prompt_ids=prompt, max_new_tokens=TOKENS, strategy=PLAIN)
                stats = job.result().stats
                token = reported(stats["decode_seconds"]) / (stats["tokens"] - 1)
                found.append(
                    token * (1 - sum(map(reported, stats["stage_busy"]))) / (setup.stages + 1)
                )
            return statistics.median(found)

        yield hop
