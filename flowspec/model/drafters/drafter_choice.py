"""Several drafters to choose from: each pass names one, and the others catch up later."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftExecutor, DraftsBlocks, RowArray, evict, first_facts, keeping


class ChoiceDrafter:
    """Runs each pass on the drafter it names; a drafter allocates a run's rows at first use.

    Most strategies use the first drafter only, and the others would allocate as many rows each.
    """

    def __init__(self, drafters: Sequence[DraftExecutor]) -> None:
        """ConfigError without ``drafters``."""
        if not drafters:
            raise ConfigError("there are no drafters to choose from; expected at least one")
        self.drafters = tuple(drafters)
        self._needs: dict[RunKey, tuple[int, Sampling, Returns]] = {}
        self._holders: dict[RunKey, set[int]] = {}  # by run: drafters with rows allocated

    @property
    def wants_hidden(self) -> bool:
        return any(drafter.wants_hidden for drafter in self.drafters)

    def facts(self) -> dict[str, object]:
        """See ``first_facts``."""
        return first_facts(self.drafters)

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._needs[run] = (capacity, sampling, returns)
        self._holders[run] = set()

    def release(self, run: RunKey) -> None:
        self._needs.pop(run, None)
        for number in self._holders.pop(run, ()):
            self.drafters[number].release(run)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below. A strategy that does not choose has the first cache."""
        holders = self._holders[run]
        for number, wanted in enumerate(caches):
            if number in holders and wanted.rows:
                keeping(self.drafters[number]).keep(run, (wanted,))

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        # Not at first use as the rest: the rows may be evicted before.
        for number, rows in enumerate(held):
            if rows:
                keeping(self._with_room(number, run)).resume(run, source, (rows,))

    def evict(self, run: RunKey) -> None:
        for drafter in self.drafters:
            evict(drafter, run)

    def run(self, work: Draft) -> DraftDone:
        """Run the drafter that ``work`` names; StateError if there is none of that number."""
        self._check(work)
        return self._with_room(work.drafter, work.part.run).run(work)

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        """As ``DraftExecutor.run_together``, the drafts that name one drafter together."""
        found: dict[int, DraftDone | WorkFailed] = {}
        for number in sorted({work.drafter for work in works}):
            own = [at for at, work in enumerate(works) if work.drafter == number]
            found.update(zip(own, self._run_on(number, [works[at] for at in own]), strict=True))
        return [found[at] for at in range(len(works))]

    def _run_on(self, number: int, works: Sequence[Draft]) -> Sequence[DraftDone | WorkFailed]:
        try:
            self._check(works[0])
        except StateError as error:
            return [WorkFailed(str(error))] * len(works)
        for work in works:
            self._with_room(number, work.part.run)
        return self.drafters[number].run_together(works)

    def _check(self, work: Draft) -> None:
        if work.drafter >= len(self.drafters):
            raise StateError(f"a pass names drafter {work.drafter}; there are {len(self.drafters)}")

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """Pass the rows to the drafters that want them; StateError if none does."""
        if not self.wants_hidden:
            raise StateError("none of these drafters drafts from hidden rows")
        for number, drafter in enumerate(self.drafters):
            if drafter.wants_hidden:
                self._with_room(number, run).learn(run, ids, rows)

    def _with_room(self, number: int, run: RunKey) -> DraftExecutor:
        drafter = self.drafters[number]
        holders = self._holders[run]
        if number not in holders:
            drafter.allocate(run, *self._needs[run])
            holders.add(number)
        return drafter


def wanting_hidden(drafter: DraftExecutor) -> tuple[bool, ...]:
    """Whether each drafter of a ``ChoiceDrafter``, or ``drafter`` itself, wants hidden rows."""
    several = drafter.drafters if isinstance(drafter, ChoiceDrafter) else (drafter,)
    return tuple(one.wants_hidden for one in several)


def levels_of(drafter: DraftExecutor) -> tuple[int, ...]:
    """Per drafter, as ``wanting_hidden``: the levels of a block drafter's pass, else 0.

    Empty if none is a block drafter.
    """
    several = drafter.drafters if isinstance(drafter, ChoiceDrafter) else (drafter,)
    levels = tuple(one.levels if isinstance(one, DraftsBlocks) else 0 for one in several)
    return levels if any(levels) else ()
