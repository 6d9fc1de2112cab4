"""What a driver needs from a model: three small protocols over numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from flowspec.core.protocol.machine import Draft, DraftDone, Pass, PassDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling

#: Rows of one job leaving a stage: ``[rows, hidden]`` or, for the toy model, ``[rows]``.
RowArray = npt.NDArray[Any]


class StageExecutor(Protocol):
    """A block of the target's layers with the KV rows of its jobs."""

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """Make room for ``capacity`` rows of ``job``."""
        ...

    def release(self, job: str) -> None:
        """Free the rows of ``job``."""
        ...

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        """Compute ``work``. ``inputs``: per part the rows that came with its segment (all of them;
        the part's ``offsets`` say which are left), None where the part has tokens. Returns the
        answers and, per part, the rows computed.
        """
        ...


class DraftExecutor(Protocol):
    """A drafter with its own KV rows. ``wants_hidden``: it drafts from the target's hidden rows."""

    @property
    def wants_hidden(self) -> bool: ...

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None: ...

    def release(self, job: str) -> None: ...

    def run(self, work: Draft) -> DraftDone:
        """The best ``work.width`` continuations of every answered row."""
        ...

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """The target's hidden rows ``[ids, hidden]`` after its final norm, float32, of nodes
        ``ids``.

        Only called if ``wants_hidden``; then every context row is drafted from after its
        parent's row has been learnt, and context rows come again in no pass.
        """
        ...
