"""A stage without layers forwards the remaining rows, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.work import Choice, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.errors import StateError
from flowspec.model.empty_stage import PassingStage

PART = Part(RunKey("j", 1), 0, (0,), (-1,), (0,), (), (0,))


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=3))
def test_rows_that_are_left_are_passed_on_as_they_came(kept: list[set[int]]) -> None:
    parts = tuple(replace(PART, offsets=tuple(sorted(offsets))) for offsets in kept)
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    done, outputs = PassingStage().run(Pass(parts), [rows] * len(parts))
    assert done == PassDone((Choice(),) * len(parts))
    for part, output in zip(parts, outputs, strict=True):
        assert (output == rows[list(part.offsets)]).all()


def test_it_is_neither_the_first_stage_nor_the_last() -> None:
    with pytest.raises(StateError, match="without layers"):
        PassingStage().run(Pass((replace(PART, tokens=(5,)),)), [None])
    with pytest.raises(StateError, match="without layers"):
        PassingStage().run(
            Pass((replace(PART, answers=(0,)),)), [np.zeros((1, 3), dtype=np.float32)]
        )
