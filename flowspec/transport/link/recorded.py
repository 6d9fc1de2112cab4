"""The bound of a run's recording."""

from __future__ import annotations

from collections import Counter

from flowspec.core.run.key import RunKey
from flowspec.transport.base import RECORDING_CAP, Op, Record


class Recorded:
    """Counts the lines that one process has recorded of each run."""

    def __init__(self) -> None:
        self._lines: Counter[RunKey] = Counter()

    def over(self, op: Op) -> bool:
        """Count ``op`` if it is a line of a recording; whether it is beyond the cap."""
        if not isinstance(op, Record):
            return False
        self._lines[op.run] += 1
        return self._lines[op.run] > RECORDING_CAP

    def forget(self, run: RunKey) -> None:
        """Drop the count of ``run``, which has ended."""
        self._lines.pop(run, None)
