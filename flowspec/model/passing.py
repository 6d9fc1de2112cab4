"""A verify stage without layers: an emulated pipeline may have more stages than its target has
layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.machine import Choice, Pass, PassDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray


class PassingStage:
    """Passes rows on as they came; neither the first stage of a pipeline nor the last."""

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        """It holds no rows."""

    def release(self, job: str) -> None:
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
