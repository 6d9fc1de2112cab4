"""Several drafters of which every pass names one: a strategy chooses, the others fall behind and catch up."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.machine import Draft, DraftDone
from flowspec.core.messages import Returns
from flowspec.core.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor, RowArray


class ChoiceDrafter:
    """``drafters`` by number; all of them hold rows of every job."""

    def __init__(self, drafters: Sequence[DraftExecutor]) -> None:
        """ConfigError without ``drafters``."""
        if not drafters:
            raise ConfigError("there are no drafters to choose from; expected at least one")
        self.drafters = tuple(drafters)

    @property
    def wants_hidden(self) -> bool:
        return any(drafter.wants_hidden for drafter in self.drafters)

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        for drafter in self.drafters:
            drafter.allocate(job, capacity, sampling, returns)

    def release(self, job: str) -> None:
        for drafter in self.drafters:
            drafter.release(job)

    def run(self, work: Draft) -> DraftDone:
        """As the drafter ``work`` names; StateError if there is none of that number."""
        if work.drafter >= len(self.drafters):
            raise StateError(f"a pass names drafter {work.drafter}; there are {len(self.drafters)}")
        return self.drafters[work.drafter].run(work)

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """Passed on to the drafters that want it; StateError if none does."""
        if not self.wants_hidden:
            raise StateError("none of these drafters drafts from hidden rows")
        for drafter in self.drafters:
            if drafter.wants_hidden:
                drafter.learn(job, ids, rows)


def wanting_hidden(drafter: DraftExecutor) -> tuple[bool, ...]:
    """Of every drafter ``drafter`` is a choice of, or of itself, whether it wants hidden rows."""
    several = drafter.drafters if isinstance(drafter, ChoiceDrafter) else (drafter,)
    return tuple(one.wants_hidden for one in several)
