"""A verify stage without layers, for emulated pipelines with more stages than target layers."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Kept, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray


class PassingStage:
    """Passes rows on unchanged; never the first or the last stage of a pipeline."""

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """It holds no rows."""

    def release(self, run: RunKey) -> None:
        """It holds no rows."""

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """It holds no rows."""

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        """It holds no rows."""

    def evict(self, run: RunKey) -> None:
        """It holds no rows."""

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs = []
        for part, rows in zip(work.parts, inputs, strict=True):
            if rows is None or part.answers:
                raise StateError(
                    "a stage without layers neither embeds tokens nor answers for rows"
                )
            outputs.append(rows[list(part.offsets)])
        return PassDone((Choice(),) * len(work.parts)), outputs
