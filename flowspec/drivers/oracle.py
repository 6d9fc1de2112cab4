"""A target that knows its own text: stages for simulations with real acceptance, at no cost.

Rows off the true path are computed by nobody who matters: acceptance only ever walks the path of
the target's own tokens. So it is enough to know, per row, whether it lies on that path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowspec.core.protocol.machine import Choice, Part, Pass, PassDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import RowArray


class OracleStage:
    """Any stage of a target whose whole ``sequences`` (prompt and output, by job) are known.

    ``hidden``: by job the target's rows after its final norm along that sequence, ``[tokens,
    hidden]``, for drafters that draft from them; a row off the path gets zeros, which nobody
    ever uses.
    """

    def __init__(
        self, sequences: Mapping[str, Sequence[int]], hidden: Mapping[str, RowArray] | None = None
    ) -> None:
        self._sequences = sequences
        self._hidden = hidden or {}
        self._returned: set[str] = set()  # jobs that want hidden rows
        self._on_path: dict[str, bytearray] = {}  # by slot, 1: the row is on the path

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._on_path[job] = bytearray(capacity)
        if returns.hidden:
            self._returned.add(job)

    def release(self, job: str) -> None:
        self._on_path.pop(job, None)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs: list[RowArray] = []
        choices = []
        for part, rows in zip(work.parts, inputs, strict=True):
            if rows is None:
                true = self._first_stage(part)
            else:
                true = rows if len(rows) == len(part.offsets) else rows[list(part.offsets)]
            outputs.append(self._rows(part, true))
            choices.append(self._choose(part, true) if part.answers else Choice())
        return PassDone(tuple(choices)), outputs

    def _rows(self, part: Part, true: RowArray) -> RowArray:
        """What leaves this stage: whether each row is on the path, or, from the last one, its
        hidden row.
        """
        if not part.answers or part.job not in self._returned:
            return true
        known = self._hidden[part.job]
        places = np.minimum(part.positions, len(known) - 1)
        return np.where(true[:, None], known[places], np.float32(0))

    def _first_stage(self, part: Part) -> RowArray:
        sequence = self._sequences[part.job]
        held = self._on_path[part.job]
        if part.moves is not None:
            start = part.moves.start
            sources = part.moves.sources
            held[start : start + len(sources)] = bytes([held[source] for source in sources])
        above = part.parents[len(part.parents) - len(part.ids) :]
        rows = enumerate(zip(part.positions, part.tokens, above, strict=True), start=part.held)
        for slot, (position, token, parent) in rows:
            known = position < len(sequence) and sequence[position] == token
            held[slot] = known and (parent < 0 or held[part.context + parent])
        return np.frombuffer(bytes(held[part.held : part.held + len(part.ids)]), dtype=np.bool_)

    def _choose(self, part: Part, true: RowArray) -> Choice:
        sequence = self._sequences[part.job]
        on_path = true.tolist()
        return Choice(
            tuple(
                [
                    sequence[part.positions[row] + 1]
                    if on_path[row] and part.positions[row] + 1 < len(sequence)
                    else 0
                    for row in part.answers
                ]
            )
        )
