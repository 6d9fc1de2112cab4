"""A target that knows its own text: stages for simulations with real acceptance, at no cost.

Rows off the true path are computed by nobody who matters: acceptance only ever walks the path of the
target's own tokens. So it is enough to know, per row, whether it lies on that path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flowspec.core.machine import Choice, Part, Pass, PassDone
from flowspec.core.messages import Returns
from flowspec.core.sampling import Sampling
from flowspec.model.base import RowArray


class OracleStage:
    """Any stage of a target whose whole ``sequences`` (prompt and output, by job) are known.

    ``hidden``: by job the target's rows after its final norm along that sequence, ``[tokens, hidden]``, for
    drafters that draft from them; a row off the path gets zeros, which nobody ever uses.
    """

    def __init__(self, sequences: Mapping[str, Sequence[int]], hidden: Mapping[str, RowArray] | None = None) -> None:
        self._sequences = sequences
        self._hidden = hidden or {}
        self._returned: set[str] = set()  # jobs that want hidden rows
        self._on_path: dict[str, npt.NDArray[np.bool_]] = {}

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._on_path[job] = np.zeros(capacity, dtype=np.bool_)
        if returns.hidden:
            self._returned.add(job)

    def release(self, job: str) -> None:
        self._on_path.pop(job, None)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs: list[RowArray] = []
        choices = []
        for part, rows in zip(work.parts, inputs, strict=True):
            true = self._first_stage(part) if rows is None else rows[list(part.offsets)].astype(np.bool_)
            outputs.append(self._rows(part, true))
            choices.append(self._choose(part, true))
        return PassDone(tuple(choices)), outputs

    def _rows(self, part: Part, true: npt.NDArray[np.bool_]) -> RowArray:
        """What leaves this stage: whether each row is on the path, or, from the last one, its hidden row."""
        if not part.answers or part.job not in self._returned:
            return true
        known = self._hidden[part.job]
        places = np.minimum(part.positions, len(known) - 1)
        return np.where(true[:, None], known[places], np.float32(0))

    def _first_stage(self, part: Part) -> npt.NDArray[np.bool_]:
        sequence, held = self._sequences[part.job], self._on_path[part.job]
        if part.moves is not None:
            count = len(part.moves.sources)
            held[part.moves.start : part.moves.start + count] = held[list(part.moves.sources)]
        new_parents = part.parents[len(part.parents) - len(part.ids) :]
        for row, (position, token, parent) in enumerate(zip(part.positions, part.tokens, new_parents, strict=True)):
            above = bool(held[part.context + parent]) if parent >= 0 else True
            known = position < len(sequence) and sequence[position] == token
            held[part.held + row] = above and known
        return held[part.held : part.held + len(part.ids)].copy()

    def _choose(self, part: Part, true: RowArray) -> Choice:
        sequence = self._sequences[part.job]
        following = (part.positions[row] + 1 for row in part.answers)
        return Choice(
            tuple(
                sequence[index] if true[row] and index < len(sequence) else 0
                for row, index in zip(part.answers, following, strict=True)
            )
        )
