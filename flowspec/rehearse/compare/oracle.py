"""A target with known text: stages for simulations with real acceptance and no computation.

Acceptance only walks the path of the target's own tokens. So a stage only needs to know, per row,
whether the row is on that path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import RowArray


class OracleStage:
    """Any stage of a target whose whole ``sequences`` (prompt and output, by job) are known.

    ``hidden``: by job the target's rows after its final norm along that sequence,
    ``[tokens, hidden]``, for drafters that draft from them; a row off the path gets zeros, which
    are never used.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence[int]],
        hidden: Mapping[str, RowArray] | None = None,
    ) -> None:
        self._sequences = sequences
        self._hidden = {} if hidden is None else hidden
        self._returned: set[RunKey] = set()  # runs that need hidden rows
        # Live tree rows by run: id -> whether the row is on the path.
        self._on_path: dict[RunKey, dict[int, bool]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._on_path[run] = {}
        if returns.hidden:
            self._returned.add(run)

    def release(self, run: RunKey) -> None:
        self._on_path.pop(run, None)
        self._returned.discard(run)

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
        """The output rows: whether each row is on the path, or hidden rows after the last stage."""
        if not part.answers or part.run not in self._returned:
            return true
        known = self._hidden[part.run.job]
        places = np.minimum(part.positions, len(known) - 1)
        return np.where(true[:, None], known[places], np.float32(0))

    def _first_stage(self, part: Part) -> RowArray:
        """Whether each row is on the path: its token is the sequence's, and so are its ancestors'.

        A parent that is not a live tree row is context, which is on the path.
        """
        sequence = self._sequences[part.run.job]
        tree = self._on_path[part.run]
        if part.pruned is not None:
            tree = self._on_path[part.run] = {node: tree[node] for node in part.pruned.live}
        true = []
        rows = zip(part.ids, part.parents, part.positions, part.tokens, strict=True)
        for at, (node, parent, position, token) in enumerate(rows):
            known = position < len(sequence) and sequence[position] == token
            on_path = known and tree.get(parent, True)
            true.append(on_path)
            if at >= part.context:
                tree[node] = on_path
        return np.array(true, dtype=np.bool_)

    def _choose(self, part: Part, true: RowArray) -> Choice:
        sequence = self._sequences[part.run.job]
        on_path = true.tolist()
        last = len(sequence) - 1
        tokens = []
        for row in part.answers:
            position = part.positions[row]
            known = on_path[row] and position < last
            tokens.append(sequence[position + 1] if known else 0)
        return Choice(tuple(tokens))
