"""The identity of a run: the key under which everything of it is kept."""

from __future__ import annotations

from dataclasses import dataclass

#: Longest id of a job or a task, bytes of UTF-8: names of the broker's keys are made from them.
MAX_ID_BYTES = 64


def may_be_id(text: str) -> bool:
    """Whether ``text`` is short enough for an id."""
    return len(text) <= MAX_ID_BYTES and len(text.encode(errors="replace")) <= MAX_ID_BYTES


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """One run of a job: the job's id and the run's ownership epoch.

    Everything of a run (messages, rows, executors, sessions, recordings) is kept under this key
    alone. A message of an older epoch therefore names another, unknown run, and no process has to
    compare epochs. A job's epochs start at 1 and only increase; only the scheduler's scripts raise
    them.
    """

    job: str
    epoch: int

    def __hash__(self) -> int:
        # A string keeps its hash, so this is faster than hashing a tuple; every message is looked
        # up by its run several times.
        return hash(self.job) + self.epoch
