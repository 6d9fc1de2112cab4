"""The order in which waiting jobs begin, and which of them have waited too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.run.spec import waiting_terms


@dataclass(frozen=True, slots=True)
class Terms:
    """By what a job waits: its priority, and until when; None: for ever.

    ``since``: when it was first seen. Times are on the caller's clock.
    """

    since: float
    priority: int = 0
    until: float | None = None


class QueueOrder:
    """The terms of the jobs in the queue; ``fields``: gives those that a job was submitted with.

    They are read once, when the job is first seen in the queue: its wait is counted from then.
    """

    def __init__(self, fields: Callable[[str], Mapping[str, str]]) -> None:
        self._fields = fields
        self._terms: dict[str, Terms] = {}

    def look(self, waiting: Sequence[str], now: float) -> None:
        """Take note of ``waiting``, the jobs in the queue, oldest first."""
        known = self._terms
        self._terms = {job: known.get(job) or self._read(job, now) for job in waiting}

    def overdue(self, now: float) -> list[str]:
        """The jobs that have not begun in time."""
        return [
            job
            for job, terms in self._terms.items()
            if terms.until is not None and now >= terms.until
        ]

    def waiting_since(self, moment: float) -> list[str]:
        """The jobs that have waited since ``moment`` or longer."""
        return [job for job, terms in self._terms.items() if terms.since <= moment]

    @property
    def in_turn(self) -> list[str]:
        """The jobs, of the highest priority first, and of equal ones the oldest."""
        return sorted(self._terms, key=lambda job: -self._terms[job].priority)

    def drop(self, job: str) -> None:
        """Forget ``job``, which waits no longer."""
        self._terms.pop(job, None)

    def _read(self, job: str, now: float) -> Terms:
        priority, wait_seconds = waiting_terms(self._fields(job))
        return Terms(now, priority, now + wait_seconds if wait_seconds else None)
