"""A session that begins after a committed prefix continues the text of plain decoding."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from flowspec.core.protocol.messages import Earlier
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.rehearse.simulator import RunRecord
from flowspec.strategies import EXACT, build
from tests.marks import crossed
from tests.toy import PROMPT, TARGET, pipeline

COUNT = 12
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=3)]
#: Every strategy alone, and those that use a middle model with one.
PIPELINES = [(name, ()) for name in EXACT] + [
    (name, (0.8,)) for name in EXACT if build(name, 1).uses_middles
]


@cache
def plain(sampling: Sampling) -> tuple[int, ...]:
    text = TARGET.decode(PROMPT, COUNT, sampling)
    assert len(text) > 10, "the text ends before a prefix of it could be continued"
    return text


def continued(
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    sampling: Sampling,
    committed: tuple[int, ...],
    middles: tuple[float, ...] = (),
    **drafter: Any,
) -> RunRecord:
    """The record of a job of which ``committed`` was in the output at its start.

    ``drafter``: ``hit_rate`` and ``ranks`` of the toy drafter.
    """
    simulation = pipeline(2, middles=middles, **drafter)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy=strategy, sampling=sampling)
    earlier = Earlier(PROMPT, (committed[:2], committed[2:]))
    assign = partial(simulation.ledger.assign, earlier=earlier)
    monkeypatch.setattr(simulation.ledger, "assign", assign)
    simulation.submit("job", spec)
    entry = simulation.ledger.jobs["job"]
    entry.offset = len(PROMPT) + len(committed) - 1
    entry.emitted = len(committed)
    simulation.jobs["job"].tokens += committed
    simulation.run()
    return simulation.jobs["job"]


@pytest.mark.parametrize(("pipeline", "sampling"), crossed(PIPELINES, SAMPLINGS))
def test_the_text_continues_the_prefix(
    monkeypatch: pytest.MonkeyPatch,
    pipeline: tuple[str, tuple[float, ...]],
    sampling: Sampling,
) -> None:
    strategy, middles = pipeline
    expected = plain(sampling)
    for k in (0, 1, 5, len(expected) - 1):
        record = continued(monkeypatch, strategy, sampling, expected[:k], middles)
        assert record.finish is not None
        assert record.finish.error == ""
        assert record.finish.reason == ("eos" if expected[-1] in TARGET.eos else "length")
        assert tuple(record.tokens) == expected
        assert record.committed_at[0][1] == k + 1, "the first verdict is one token, the prompt's"


@pytest.mark.parametrize("strategy", ["chain", "flowspec", "speculative", "specpipe"])
def test_the_drafter_gets_the_prefix(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """A drafter that is always right about the whole text misses after a wrong one."""
    expected = plain(Sampling())
    record = continued(monkeypatch, strategy, Sampling(), expected[:5], hit_rate=1.0, ranks=(0,))
    assert record.finish is not None
    assert tuple(record.tokens) == expected
    assert record.finish.stats["hit_rate"] == 1.0
