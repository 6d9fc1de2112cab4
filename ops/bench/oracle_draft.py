"""A draft worker whose drafter knows the target's text and is right at settable rates.

    python -m ops.bench.oracle_draft --oracle FILE [the draft worker's arguments]

FILE is a ``TextOracle`` as JSON, read at the start of every job. While it does not exist, drafts
are never right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import DraftExecutor, RowArray
from flowspec.model.weights.directory import ModelDirectory
from flowspec.rehearse.compare.hits import HitDrafter, Kind, geometric
from flowspec.start.boot import run
from workers import draft

#: Rate of the second rank, as a share of the misses of the first; each further one is half of the
#: one before. About that of a small model of the target's family.
SECOND = 1 / 3


@dataclass(frozen=True, slots=True)
class TextOracle:
    """What the drafter is: the text's ``ids`` with the prompt, ``rate`` of its first rank, ``seed``
    of its hits, and the ``seconds`` that each of its passes takes.
    """

    ids: tuple[int, ...] = ()
    rate: float = 0.7
    seed: int = 0
    seconds: float = 0.0

    @property
    def rates(self) -> tuple[float, ...]:
        """The rate of every rank."""
        rest = (1 - self.rate) * SECOND
        return (self.rate, *geometric(min(rest, self.rate), 0.5, 15))

    def write(self, file: Path) -> None:
        """Write ``file`` atomically."""
        partial_file = file.with_name(file.name + ".partial")
        partial_file.write_text(json.dumps(asdict(self)), encoding="utf-8")
        partial_file.replace(file)


def read(file: Path) -> TextOracle:
    """The oracle in ``file``; one that knows no text if there is none."""
    if not file.exists():
        return TextOracle()
    known = json.loads(file.read_text(encoding="utf-8"))
    return TextOracle(**{**known, "ids": tuple(known["ids"])})


class OracleDrafter:
    """The drafter of each run is that of ``file`` when the run begins."""

    wants_hidden = False

    def __init__(
        self, file: Path, vocabulary: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = file
        self._vocabulary = vocabulary
        self._clock = clock
        self._runs: dict[RunKey, tuple[HitDrafter, float]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        oracle = read(self._file)
        drafter = HitDrafter(
            {run.job: oracle.ids}, [Kind(oracle.rates)], self._vocabulary, seed=oracle.seed
        )
        drafter.allocate(run, capacity, sampling, returns)
        self._runs[run] = (drafter, oracle.seconds)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """As ``DraftExecutor.learn``; never called."""

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; computes until the oracle's seconds are over."""
        (found,) = self._compute([work])
        return found

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        """As ``DraftExecutor.run_together``, in the seconds of one pass."""
        return [*self._compute(works)]

    def _compute(self, works: Sequence[Draft]) -> list[DraftDone]:
        known = [self._runs[work.part.run] for work in works]
        until = self._clock() + max(seconds for _, seconds in known)
        done = [drafter.run(work) for work, (drafter, _) in zip(works, known, strict=True)]
        while self._clock() < until:
            continue
        return done


def load(file: Path, name: str, target: ModelDirectory, dtype: str, device: str) -> DraftExecutor:
    """As ``workers.draft.Load``: the drafter of ``file``, whatever the record names."""
    return OracleDrafter(file, target.vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--oracle", type=Path, required=True)
    given, rest = parser.parse_known_args(sys.argv[1:])
    run(partial(draft.main, partial(load, given.oracle), rest), "draft")


if __name__ == "__main__":
    main()
