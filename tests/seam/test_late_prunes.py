"""Prunes that are later than the segments sent after them: these go straight, prunes do not."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.messages import Envelope, Prune
from flowspec.core.run.sampling import Sampling
from flowspec.rehearse.simulator import Costs, unit_costs
from flowspec.strategies import EXACT
from tests.toy import PROMPT, TARGET, generate

#: Their segments leave in another order than their nodes were drafted in.
BEST_FIRST = ("auto", "auto:rows=4", "flowspec:nodes=32,segment=2")
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=2))


def late(prune: float) -> Costs:
    """Links of half a pass; a prune takes ``prune`` passes to every stage but the first."""

    def seconds(source: Address, target: Address, envelope: Envelope) -> float:
        beyond = target.role is Role.VERIFY and target.number > 1
        return prune if beyond and isinstance(envelope.message, Prune) else 0.5

    return Costs(lambda node, work: unit_costs(work), seconds)


@pytest.mark.parametrize(
    ("variant", "sampling"),
    [(variant, SAMPLINGS[0]) for variant in EXACT]
    + [(variant, SAMPLINGS[1]) for variant in BEST_FIRST],
)
def test_segments_may_overtake_prunes(variant: str, sampling: Sampling) -> None:
    record = generate(variant, 4, costs=late(6.0), hit_rate=0.8, sampling=sampling, count=40)
    assert record.finish is not None
    assert record.finish.error == ""
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 40, sampling)
