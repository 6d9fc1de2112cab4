"""Times of the stages' passes at a pipeline's pace: one process per stage, in turn, with rests.

A pass that follows another at once finds its weights in the caches and a core that is awake. In a
pipeline each stage rests while a token is elsewhere, and its pass takes longer. So the stages of a
target compute one after another in processes of their own, with a pause of one hop before each
pass, and the wall clock is read.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import NamedTuple

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pass
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ClusterError
from flowspec.model.timing import MEASURED, context_of, prompt_part, random_rows, siblings
from flowspec.model.weights.directory import layer_ranges, open_directory
from flowspec.rehearse.devices.profile import Times
from flowspec.rehearse.measure import rising

#: Longest wait for a stage to be loaded, or for a pass.
_SECONDS = 120.0


class PassTime(NamedTuple):
    """Seconds of a pass: the ``whole``, and its ``model`` without masks, KV moves and choices."""

    whole: float
    model: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage's passes by their rows: ``whole`` and ``model`` as of ``PassTime``."""

    whole: Times
    model: Times


class PacedStages:
    """The ``stages`` of the model ``target``, each with a context in its cache.

    ``most_rows``: of a pass. ClusterError from any method if a stage's process has ended.
    """

    def __init__(self, target: str, stages: int, most_rows: int) -> None:
        self._arguments = [(target, stage, stages, most_rows) for stage in range(stages)]
        self._stages: list[tuple[mp.process.BaseProcess, Connection]] = []

    def __enter__(self) -> PacedStages:
        context = mp.get_context("spawn")
        for arguments in self._arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._stages.append((process, ours))
        return self

    def __exit__(self, *exc: object) -> None:
        for process, pipe in self._stages:
            pipe.close()
            process.join()
        self._stages.clear()

    def measure(
        self,
        rows: Sequence[int],
        pause: float,
        repeats: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[StageTimes]:
        """Times of every stage, medians of ``repeats``; ``pause``: seconds before each pass."""
        found: list[dict[int, list[PassTime]]] = [{} for _ in self._stages]
        for count in rows:
            for _ in range(1 + repeats):  # the first pass of `count` rows allocates
                for (_, pipe), taken in zip(self._stages, found, strict=True):
                    sleep(pause)
                    taken.setdefault(count, []).append(_pass(pipe, count))
        return [_times(taken) for taken in found]


def _pass(pipe: Connection, rows: int) -> PassTime:
    try:
        pipe.send(rows)
        if pipe.poll(_SECONDS):
            return PassTime(*pipe.recv())
    except (EOFError, OSError):
        raise ClusterError("a stage that was measured has ended") from None
    raise ClusterError(f"a pass of {rows} rows took more than {_SECONDS:g} s")


def _times(taken: Mapping[int, Sequence[PassTime]]) -> StageTimes:
    def of(name: str) -> Times:
        return rising(
            {
                rows: statistics.median(getattr(one, name) for one in times[1:])
                for rows, times in taken.items()
            }
        )

    return StageTimes(of("whole"), of("model"))


def serve(pipe: Connection, target: str, stage: int, stages: int, most_rows: int) -> None:
    """Compute a pass of as many rows as ``pipe`` says, and answer with its times, until its end."""
    import torch

    from flowspec.model.layers.placing import place
    from flowspec.model.stage import load_stage

    torch.set_num_threads(1)
    directory = open_directory(target)
    layers = layer_ranges(directory.layers, stages)[stage]
    executor = load_stage(directory, layers, placing=place("float32", "cpu", directory.config))

    def compute(part: Part, rows: int) -> PassTime:
        asked = replace(part, answers=part.answers if stage == stages - 1 else ())
        given = None if part.tokens else random_rows(rows, directory.hidden_size)
        wall = time.monotonic()
        spent = time.thread_time()
        model = executor.model_seconds
        executor.run(Pass((asked,)), [given])
        whole = time.monotonic() - wall
        around = (time.thread_time() - spent) - (executor.model_seconds - model)
        return PassTime(whole, whole - around)

    context = context_of(directory)
    executor.allocate(MEASURED, context + most_rows, Sampling(), Returns())
    compute(prompt_part(directory, tokens=stage == 0), context)
    try:
        while True:
            rows = pipe.recv()
            pipe.send(compute(siblings(directory, rows, tokens=stage == 0), rows))
    except EOFError:
        return
