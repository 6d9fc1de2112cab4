"""Overlapped drafting of a static tree: what it saves, and that it costs nothing."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Compute, Input, Output
from flowspec.core.protocol.work import DraftPass
from flowspec.rehearse.simulator import Costs
from tests.addresses import D0
from tests.strategies.scripted import commits, pipeline
from tests.toy import generate

TEXT = [1, 2, *range(3, 24)]
RIGHT = {token: [(token + 1, -0.1), (token + 50, -2.0)] for token in range(3, 60)}


def costs(draft: float) -> Costs:
    return Costs(lambda node, work: draft if node == D0 else 3.0)


def test_after_the_first_trees_the_next_one_is_known_at_the_verdict() -> None:
    """Three draft passes of a second, and two stages of three; four tokens per round.

    Nothing is drafted ahead of the second round, because no round trip is known in the first.
    """
    plain = pipeline("static_tree:shape=1-1-1", TEXT, RIGHT, stages=2, costs=costs(1.0))
    assert [when for when, _ in commits(plain)] == [6, 15, 24, 33, 42, 51]
    overlapped = pipeline(
        "static_tree:shape=1-1-1,overlap=on", TEXT, RIGHT, stages=2, costs=costs(1.0)
    )
    assert [when for when, _ in commits(overlapped)] == [6, 15, 24, 30, 36, 42]
    assert [count for _, count in commits(overlapped)] == [1, 4, 4, 4, 4, 4]


def test_a_second_choice_is_drafted_ahead_as_well() -> None:
    """After every third token the drafter's best one is wrong and its second one right."""
    script = {
        token: [(90, -0.5), (token + 1, -1.0)] if token % 3 == 0 else [(token + 1, -0.1)]
        for token in range(3, 60)
    }
    ends = {}
    for overlap in ("off", "on"):
        strategy = f"static_tree:shape=1-1-1,overlap={overlap}"
        done = pipeline(strategy, TEXT, script, stages=2, costs=costs(1.0))
        ends[overlap] = commits(done)[-1][0]
    rounds = 1 + 6 + 1  # of one token, of three, and what is left
    assert ends == {"off": 6 + 9 * rounds, "on": 6 + 9 * 2 + 6 * (rounds - 2)}


def test_a_drafter_slower_than_the_pipeline_drafts_nothing_ahead() -> None:
    """A pass that is under way at the verdict would delay the next tree."""
    slow = Costs(lambda node, work: 2.5 if node == D0 else 1.0)
    plain = generate("static_tree", 2, costs=slow)
    overlapped = generate("static_tree:overlap=on", 2, costs=slow)
    assert overlapped.committed_at == plain.committed_at


@pytest.mark.parametrize("hit_rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("draft", [pytest.param(0.05, marks=pytest.mark.heavy), 0.4, 2.0])
def test_overlapping_is_never_slower(hit_rate: float, draft: float) -> None:
    """With four candidates per node in both, so that the toy drafter proposes the same."""
    ends = []
    for overlap in ("off", "on"):
        record = generate(
            f"static_tree:shape=1-4-1-1,overlap={overlap}",
            4,
            hit_rate=hit_rate,
            costs=Costs(lambda node, work: draft if node == D0 else 1.0),
        )
        ends.append(record.committed_at[-1][0])
    assert ends[1] <= ends[0]


def test_all_passes_ahead_end_before_the_verdict() -> None:
    starts: list[float] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, DraftPass):
                starts.append(now)

    done = pipeline(
        "static_tree:shape=1-1-1-1,overlap=on",
        TEXT,
        RIGHT,
        stages=1,
        costs=Costs(lambda node, work: 0.8 if node == D0 else 3.0),
        tap=tap,
    )
    ends = [when for when, _ in commits(done)]
    assert not [
        (start, end) for start in starts for end in ends if start < end < start + 0.8 - 1e-9
    ]
