"""The protocols through which drivers run models, over numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from flowspec.core.protocol.machine import Allocate
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import (
    Draft,
    DraftDone,
    DraftPass,
    DraftPassDone,
    Kept,
    Pass,
    PassDone,
    WorkFailed,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError, StateError

#: The fact of a stage: seconds that a lone row takes.
ROW = "row_seconds"
#: Rows of one job leaving a stage: ``[rows, hidden]`` or, for the toy model, ``[rows]``.
RowArray = npt.NDArray[Any]


class StageExecutor(Protocol):
    """A block of the target's layers with the KV rows of its jobs."""

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """Make room for at most ``capacity`` rows of ``run``."""
        ...

    def release(self, run: RunKey) -> None:
        """Free the rows of ``run``."""
        ...

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        """Compute ``work``; return the choices and, per part, the computed rows.

        ``inputs``: per part, all rows sent with its segment, of which the part's ``offsets``
        select the live ones; None: the part has tokens. Of several parts one may fail alone
        (``PassDone``); its rows are empty.
        """
        ...


@runtime_checkable
class KeepsRows(Protocol):
    """An executor that can keep first rows of runs, for runs that begin as those did.

    It has one cache, or one for every drafter to choose from; the sequences are parallel to them.
    """

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """Keep copies of ``run``'s rows, which outlast it; of a cache with 0 rows nothing."""
        ...

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        """Give ``run``, which has just been allocated, the first ``held`` kept rows of ``source``.

        StateError if they are not kept.
        """
        ...

    def evict(self, run: RunKey) -> None:
        """Free the kept rows of ``run``, if there are any."""
        ...


@runtime_checkable
class HasFacts(Protocol):
    """An executor that tells its precision, device and kernels."""

    def facts(self) -> dict[str, object]: ...


@runtime_checkable
class HasRoom(Protocol):
    """An executor that tells how it stores KV rows, and what is free by now."""

    def room(self) -> dict[str, object]: ...


def placed(info: Mapping[str, Any]) -> str | None:
    """What runs where in a worker's facts, like ``bfloat16 on cpu by onednn``; None: no model.

    Of a GGUF file with the types that it has: ``bfloat16 rounded from Q4_1+Q8_0 on cpu by onednn``.
    """
    if "precision" not in info:
        return None
    kernels = "+".join(info.get("kernels", ()))
    dependent = "" if info.get("rows_independent", True) else ", rows depend on each other"
    stored = f" {info['stored']}" if "stored" in info else ""
    return f"{info['precision']}{stored} on {info['device']} by {kernels}{dependent}"


@runtime_checkable
class DraftsBlocks(Protocol):
    """A drafter that proposes for several positions in one pass, and answers with ``BlockDone``."""

    @property
    def levels(self) -> int:
        """Positions that one pass proposes for, below every answered row."""
        ...


class DraftExecutor(Protocol):
    """A drafter with its own KV rows. ``wants_hidden``: it drafts from the target's hidden rows."""

    @property
    def wants_hidden(self) -> bool: ...

    def allocate(
        self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns
    ) -> None: ...

    def release(self, run: RunKey) -> None: ...

    def run(self, work: Draft) -> DraftDone:
        """The best ``work.width`` continuations of every answered row."""
        ...

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        """``run`` for drafts of different runs, with one pass where there is a model to pass.

        The proposals of each are those of ``run``. One may fail without the others.
        """
        ...

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """Store the target's hidden rows of nodes ``ids``, for the passes that follow.

        ``rows`` is ``[ids, values]``, float32: after the target's final norm, or sums over what the
        drafter reads inside the target (``taps``). Called only if ``wants_hidden``. A context row
        is in a pass only after its parent's row was learnt, and in only one pass.
        """
        ...


class DraftsAlone(ABC):
    """A drafter in which several runs have nothing to share."""

    @abstractmethod
    def run(self, work: Draft) -> DraftDone:
        """See ``DraftExecutor.run``."""

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        """See ``DraftExecutor.run_together``."""
        return [_outcome(self.run, work) for work in works]


def _outcome(run: Callable[[Draft], DraftDone], work: Draft) -> DraftDone | WorkFailed:
    try:
        return run(work)
    except Exception as error:  # noqa: BLE001 - whatever it is ends its job, no other
        return WorkFailed(reason_of(error))


def reason_of(error: Exception) -> str:
    """What is wrong, on one line."""
    if isinstance(error, FlowSpecError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def drafted(drafter: DraftExecutor, work: DraftPass) -> DraftPassDone:
    """``work`` by ``drafter``; errors as from ``DraftExecutor.run`` if it is of one run."""
    if len(work.drafts) == 1:
        return DraftPassDone((drafter.run(work.drafts[0]),))
    return DraftPassDone(tuple(drafter.run_together(work.drafts)))


def keeping(executor: object) -> KeepsRows:
    """``executor`` as one that can keep rows; StateError if it cannot."""
    if not isinstance(executor, KeepsRows):
        raise StateError(f"a {type(executor).__name__} cannot keep rows of other jobs")
    return executor


def evict(executor: object, run: RunKey) -> None:
    """Free the kept rows of ``run``; an executor that cannot keep rows has none."""
    if isinstance(executor, KeepsRows):
        executor.evict(run)


def allocate(executor: StageExecutor | DraftExecutor, output: Allocate) -> None:
    """Make room for a run, with the kept rows that it begins with."""
    executor.allocate(output.run, output.capacity, output.sampling, output.returns)
    if output.source is not None:
        keeping(executor).resume(output.run, output.source, output.held)


def first_facts(drafters: Sequence[object]) -> dict[str, object]:
    """What the first of ``drafters`` with a model runs on; empty if none has."""
    told = (drafter.facts() for drafter in drafters if isinstance(drafter, HasFacts))
    return next(told, {})
