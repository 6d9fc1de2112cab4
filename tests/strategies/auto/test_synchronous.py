"""Synchronous choices of ``auto``: one segment at a time, and any change of mind keeps the text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.pass_times import PassTimes
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.session.strategy import Occasion, View
from flowspec.core.tree.tree import Expansion, Tree
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.drafter_bandit import (
    PLAIN,
    DrafterBandit,
    DrafterSpeed,
    synchronous,
)
from flowspec.strategies.auto.strategy import Auto, AutoParams
from flowspec.strategies.auto.synchronous import MOST_CANDIDATES, SynchronousGrowth
from tests.marks import examples
from tests.toy import PROMPT, TARGET, pipeline

COUNT = 40
CHOICES = (0, PLAIN, synchronous(0))


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([Sampling(), Sampling(1.0, seed=3)]),
    st.lists(st.sampled_from(CHOICES), min_size=1, max_size=COUNT),
)
def test_the_text_is_the_targets_however_often_the_choice_changes(
    stages: int, sampling: Sampling, choices: list[int]
) -> None:
    turns = iter(range(10**6))

    def update(bandit: DrafterBandit, tokens: int, seconds: float) -> int:
        bandit.choice = choices[next(turns) % len(choices)]
        return bandit.choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterBandit, "update", update)
        simulation = pipeline(stages)
        spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, sampling=sampling, strategy="auto")
        simulation.submit("j", spec, 0.0)
        simulation.run()
    made = simulation.jobs["j"]
    assert made.finish is not None and made.finish.error == ""
    assert tuple(made.tokens) == TARGET.decode(PROMPT, COUNT, sampling)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_synchronous_job_has_one_segment_in_flight_and_drafts_nothing_meanwhile(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterBandit, "update", lambda *_: synchronous(0))
    simulation = pipeline(stages)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy="auto")
    simulation.submit("j", spec, 0.0)
    simulation.run()
    finish = simulation.jobs["j"].finish
    assert finish is not None
    stats = finish.stats
    assert stats["segments"] == stats["rounds"], "none before the one before was answered"
    assert stats["rounds"] < 0.7 * COUNT, "most candidates of the toy drafter are right"


def of_two_stages(history: History) -> Auto:
    """On two stages, of whose jobs the synchronous ones were faster."""
    speeds = history.get(CostHistory).speeds[False, False, True]
    speeds[0] = DrafterSpeed(100, 200, warm=True, tried=True)
    speeds[synchronous(0)] = DrafterSpeed(100, 100, warm=True, tried=True)
    strategy = Auto(AutoParams(), 2)
    strategy.use_history(history)
    return strategy


def test_a_candidate_costs_what_its_own_row_takes_on_all_stages() -> None:
    history = History()
    history.get(CostHistory).rate = 10.0
    for rows, seconds in ((1, 0.01), (2, 0.01), (4, 0.03)):
        history.get(PassTimes).note(rows, seconds)
    tree = Tree(5)
    tree.plant(token=7, position=4, parent=3)
    growth = of_two_stages(history).grow(View(tree, 0, 0), Occasion.ROUND)
    assert growth is not None
    while wanted := growth.proceed(tree):
        tree.expand(wanted[0], Expansion((9,), (math.log(0.5),)))
    ((_, *path),) = growth.segments(tree)
    # The first one's row is free, each further one's delays 0.2 tokens: 0.25 pays, 0.125 does not.
    assert len(path) == 2


def test_decisions_say_what_was_synchronous() -> None:
    strategy = of_two_stages(History())
    assert strategy.decisions == [{"tokens": 0, "drafter": 0, "synchronous": True}]


@given(
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12),
    st.lists(st.integers(0, 128), min_size=MOST_CANDIDATES, max_size=MOST_CANDIDATES),
    st.floats(0.0, 5.0),
)
def test_a_chain_goes_on_while_a_candidate_pays(
    chances: list[float], parts: list[int], draft: float
) -> None:
    """Candidates in a row are right with ``chances``, each if the one before is, and cost
    ``parts`` of 256: sums of such numbers are exact.

    A second row may cost nothing where a third does: kernels compute some together.
    """
    rows = [part / 256 for part in parts]
    tree = Tree(5)
    root = tree.plant(token=7, position=4, parent=3)
    growth = SynchronousGrowth(lambda count: sum(rows[: count - 1]), draft)
    asked = []
    while wanted := growth.proceed(tree):
        (node,) = wanted
        at = tree[node].depth
        known = at < len(chances)
        tree.expand(node, Expansion((9,), (math.log(chances[at]),)) if known else Expansion((), ()))
        if node != root:
            asked.append((math.exp(tree[node].score + tree[node].value), rows[at]))
    ((first, *path),) = growth.segments(tree)
    assert first == root
    assert [tree[node].depth for node in path] == [*range(1, len(path) + 1)]
    assert len(path) <= min(MOST_CANDIDATES, len(chances))
    values = [math.exp(tree[node].score) for node in path]
    assert all(value >= row for value, row in zip(values, rows, strict=False))
    assert all(promised > row + draft for promised, row in asked)
    tip = tree[([root, *path])[-1]]
    if len(path) < MOST_CANDIDATES:
        row = rows[len(path)]
        if tip.expansion is None:
            assert math.exp(tip.score + tip.value) <= row + draft, "nothing paid is left out"
        elif tip.expansion.tokens:
            assert math.exp(tip.score + tip.expansion.values[0]) < row
    assert tree[root].expansion is not None, "whatever a pass costs"
