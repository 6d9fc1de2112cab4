"""Drafts in a row of merged drafters, of which the one that is right must come to lead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.model.drafters.hybrid import HybridDrafter
from flowspec.proof.depth import acceptance_by_depth
from flowspec.proof.plain import PlainText


class Fixed(DraftsAlone):
    """Proposes one token, a function of the token before, as likely every time."""

    wants_hidden = False

    def __init__(self, after: Callable[[int], int], share: float) -> None:
        self._after = after
        self._value = math.log(share)

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        pass

    def release(self, run: RunKey) -> None:
        pass

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        pass

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise AssertionError("it wants no rows")

    def run(self, work: Draft) -> DraftDone:
        found = [self._after(work.part.tokens[row]) for row in work.part.answers]
        return DraftDone(tuple((token,) for token in found), ((self._value,),) * len(found))


def counting(length: int) -> PlainText:
    tokens = tuple(range(5, 5 + length))
    return PlainText(tokens[:4], tokens[4:], Sampling(), np.zeros(0), np.zeros(0))


WRONG = Fixed(lambda token: 0, 0.9)
RIGHT = Fixed(lambda token: token + 1, 0.3)


@pytest.mark.parametrize("sources", [(WRONG, RIGHT), (RIGHT, WRONG)])
def test_of_merged_drafters_the_better_one_leads(sources: tuple[Fixed, ...]) -> None:
    shares = acceptance_by_depth(HybridDrafter(sources), [counting(20), counting(200)], 3)
    assert shares[0] > 0.9
    assert shares == pytest.approx((shares[0],) * 3, abs=0.05)


@pytest.mark.parametrize(("drafter", "share"), [(WRONG, 0.0), (RIGHT, 1.0)])
def test_one_drafter_is_as_good_as_it_is(drafter: Fixed, share: float) -> None:
    assert acceptance_by_depth(drafter, [counting(20)], 3) == (share,) * 3
