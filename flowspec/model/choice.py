"""Several drafters of which every pass names one: a strategy chooses, the others fall behind and
catch up.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.machine import Draft, DraftDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor, RowArray


class ChoiceDrafter:
    """``drafters`` by number; each makes room for a job when it first has a part in it.

    Most strategies use only the first drafter, and the others' rows would be as many again.
    """

    def __init__(self, drafters: Sequence[DraftExecutor]) -> None:
        """ConfigError without ``drafters``."""
        if not drafters:
            raise ConfigError("there are no drafters to choose from; expected at least one")
        self.drafters = tuple(drafters)
        self._needs: dict[str, tuple[int, Sampling, Returns]] = {}
        self._holders: dict[str, set[int]] = {}  # by job: the drafters that made room for it

    @property
    def wants_hidden(self) -> bool:
        return any(drafter.wants_hidden for drafter in self.drafters)

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._needs[job] = (capacity, sampling, returns)
        self._holders[job] = set()

    def release(self, job: str) -> None:
        self._needs.pop(job, None)
        for number in self._holders.pop(job, ()):
            self.drafters[number].release(job)

    def run(self, work: Draft) -> DraftDone:
        """As the drafter ``work`` names; StateError if there is none of that number."""
        if work.drafter >= len(self.drafters):
            raise StateError(f"a pass names drafter {work.drafter}; there are {len(self.drafters)}")
        return self._with_room(work.drafter, work.part.job).run(work)

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """Passed on to the drafters that want it; StateError if none does."""
        if not self.wants_hidden:
            raise StateError("none of these drafters drafts from hidden rows")
        for number, drafter in enumerate(self.drafters):
            if drafter.wants_hidden:
                self._with_room(number, job).learn(job, ids, rows)

    def _with_room(self, number: int, job: str) -> DraftExecutor:
        drafter = self.drafters[number]
        holders = self._holders[job]
        if number not in holders:
            drafter.allocate(job, *self._needs[job])
            holders.add(number)
        return drafter


def wanting_hidden(drafter: DraftExecutor) -> tuple[bool, ...]:
    """Of every drafter ``drafter`` is a choice of, or of itself, whether it wants hidden rows."""
    several = drafter.drafters if isinstance(drafter, ChoiceDrafter) else (drafter,)
    return tuple(one.wants_hidden for one in several)
