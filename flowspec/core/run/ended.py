"""The runs that have ended at one process, so that it does not keep late messages as early ones."""

from __future__ import annotations

from flowspec.core.run.key import RunKey

#: Most jobs remembered; the oldest is dropped first.
REMEMBERED_JOBS = 1024


class EndedRuns:
    """The highest ended epoch of each job; all epochs up to it have ended."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def __contains__(self, run: RunKey) -> bool:
        return run.epoch <= self._highest.get(run.job, -1)

    def add(self, run: RunKey) -> None:
        """Mark ``run`` and all earlier runs of its job as ended."""
        self._highest[run.job] = max(run.epoch, self._highest.pop(run.job, -1))
        while len(self._highest) > REMEMBERED_JOBS:
            del self._highest[next(iter(self._highest))]
