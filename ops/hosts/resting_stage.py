"""A verify worker that rests before each pass, as if its rows had come over a slow link.

    python -m ops.hosts.resting_stage --rest FILE [the verify worker's arguments]

FILE has the seconds of a rest, read at the start of every job. The rest counts as part of the pass,
so that what a token takes beyond the passes is software, at the pace of a pipeline with such links.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import RowArray, StageExecutor
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory
from flowspec.start.boot import run
from workers import verify


class RestingStage:
    """``stage``, with a rest before each pass of the seconds in ``file``."""

    def __init__(
        self, stage: StageExecutor, file: Path, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._stage = stage
        self._file = file
        self._sleep = sleep
        self._seconds = 0.0

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._seconds = float(self._file.read_text(encoding="utf-8"))
        self._stage.allocate(run, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        self._stage.release(run)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        self._sleep(self._seconds)
        return self._stage.run(work, inputs)


def load(
    file: Path,
    target: ModelDirectory,
    layers: range,
    wanted: tuple[str, str],
    tapped: tuple[Taps | None, ModelDirectory | None],
    blocks: int,
) -> tuple[RestingStage, Callable[[], float] | None]:
    """As ``workers.verify.load_layers``, resting."""
    stage, model_seconds = verify.load_layers(target, layers, wanted, tapped, blocks)
    return RestingStage(stage, file), model_seconds


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rest", type=Path, required=True)
    given, rest = parser.parse_known_args(sys.argv[1:])
    run(partial(verify.main, partial(load, given.rest), rest), "verify")


if __name__ == "__main__":
    main()
