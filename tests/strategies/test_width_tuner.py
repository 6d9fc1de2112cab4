"""The width tuner finds the width with the least expected time between tokens, and keeps it."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.job.pass_times import PassTimes
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.tree import Expansion, Tree
from flowspec.strategies.expected_tbt import best_width
from flowspec.strategies.specpipe import SpecPipe, SpecPipeParams
from flowspec.strategies.width_tuner import MISS, SAMPLES, WIDTHS, WidthTuner

STAGES = 8
#: Candidates of a node in these tests: enough for the widest level but one.
CHILDREN = 64


def tuner_of(ranks: list[int], levels: int = 1) -> WidthTuner:
    """A tuner that remembers ``ranks`` and no pass."""
    return WidthTuner(STAGES, levels, PassTimes(), deque(ranks, maxlen=SAMPLES))


def tree_of(values: list[float]) -> Tree:
    """A root whose candidates have the tokens 10, 11, ... and these values, best first."""
    tree = Tree(0)
    tree.plant(0, 0, -1)
    tokens = tuple(range(10, 10 + len(values)))
    tree.expand(tree.root, Expansion(tokens, tuple(values)))
    return tree


def grow(tree: Tree, parent: int, width: int) -> list[int]:
    expansion = tree[parent].expansion
    assert expansion is not None
    pairs = list(zip(expansion.tokens, expansion.values, strict=True))[:width]
    return [tree.add(parent, token, value) for token, value in pairs]


def answer(tree: Tree, tokens: dict[int, int], seconds: float = 0.0, rows: int = 0) -> Answer:
    """The target's ``tokens`` by node, and further rows that nobody asks about."""
    others = tuple(range(1000, 1000 + max(0, rows - len(tokens))))
    return Answer(
        RunKey("j", 1),
        0,
        (*tokens, *others),
        (*tokens.values(), *(0 for _ in others)),
        seconds=seconds,
    )


def run(tuner: WidthTuner, ranks: list[int], seconds_of_row: float, verdicts: int = 300) -> int:
    """The width after ``verdicts`` levels in which the target's token has ``ranks`` in turn."""
    for at in range(verdicts):
        tree = tree_of([-0.01 * rank for rank in range(CHILDREN)])
        tuner.begin_round()
        width = min(tuner.width, CHILDREN)
        tuner.chose(tree, grow(tree, tree.root, width))
        rows = width if at % 3 else 1
        seconds = 1.0 + seconds_of_row * rows
        choice = {tree.root: 10 + ranks[at % len(ranks)]}
        trip = RoundTrip(rows, STAGES * seconds, alone=False)
        tuner.observe(tree, answer(tree, choice, seconds, rows), trip)
    return tuner.width


@pytest.mark.parametrize(
    ("ranks", "row"),
    [
        ([0], 0.01),  # the first is always right: all further rows are wasted
        ([0, 1, 2, 3, 4, 5, 6, 7], 0.001),  # hits up to rank 8, rows nearly free
        ([0, 0, 0, 0, 0, 0, 0, 40], 0.0001),  # a rare hit at a high rank, rows nearly free
        ([0, 0, 0, 3], 5.0),  # a second row takes three times as long
    ],
)
def test_it_settles_where_the_formula_is_least(ranks: list[int], row: float) -> None:
    times = {width: 1.0 + row * width for width in WIDTHS}
    shares = {width: sum(rank < width for rank in ranks) / len(ranks) for width in WIDTHS}
    assert run(tuner_of([0]), ranks, row) == best_width(times, shares, STAGES)


def test_it_begins_with_one_row_until_it_knows_what_a_row_costs() -> None:
    tuner = tuner_of([40])
    tree = tree_of([-0.1])
    assert tuner.width == 1
    tuner.observe(tree, answer(tree, {}, 1.0, 50), RoundTrip(50, 9.0, alone=True))
    assert tuner.width == 1
    tuner.observe(tree, answer(tree, {}, 1.0, 1), RoundTrip(1, 9.0, alone=True))
    assert tuner.width == 64, "it moves as far as the formula says at once"


def test_hits_beyond_the_width_are_seen_without_being_sent() -> None:
    tuner = tuner_of([0])
    run(tuner, [0, 0, 30], 10.0, verdicts=60)
    assert tuner.width == 1
    ranks = deque([0], maxlen=SAMPLES)
    narrow = WidthTuner(STAGES, 1, PassTimes(), ranks)
    run(narrow, [0, 0, 30], 10.0, verdicts=60)
    assert list(ranks) == [0] + [0, 0, 30] * 20


@given(
    st.lists(st.floats(-5, 0), min_size=1, max_size=12),
    st.lists(st.floats(-5, 0), min_size=1, max_size=12),
    st.integers(1, 4),
    st.data(),
)
def test_a_rank_is_the_number_of_better_candidates_of_all_parents_of_the_level(
    one: list[float], other: list[float], width: int, data: st.DataObject
) -> None:
    tree = tree_of([-0.5, -1.5])
    first, second = grow(tree, tree.root, 2)
    tree.mark_waiting([first, second])
    for node, values in ((first, one), (second, other)):
        ordered = sorted(values, reverse=True)
        tree.expand(node, Expansion(tuple(range(20, 20 + len(values))), tuple(ordered)))
    ranks = deque[int](maxlen=SAMPLES)
    tuner = WidthTuner(STAGES, 1, PassTimes(), ranks)
    tuner.chose(tree, grow(tree, first, width))
    tree.advance(first)
    token = data.draw(st.integers(20, 40))
    tuner.observe(tree, answer(tree, {first: token}), None)
    scores = [-0.5 + value for value in one] + [-1.5 + value for value in other]
    ordered = sorted(one, reverse=True)
    own = -0.5 + ordered[token - 20] if token - 20 < len(one) else None
    assert list(ranks) == [MISS if own is None else sum(score > own for score in scores)]


def test_choices_are_followed_within_a_segment() -> None:
    ranks = deque[int](maxlen=SAMPLES)
    tuner = WidthTuner(STAGES, 2, PassTimes(), ranks)
    tree = tree_of([-0.1, -0.2])
    first, second = grow(tree, tree.root, 2)
    tree.expand(second, Expansion((7, 8), (-0.1, -0.9)))
    below = grow(tree, second, 2)
    tuner.chose(tree, [first, second, *below])
    tuner.observe(tree, answer(tree, {tree.root: 11, second: 8, below[1]: 5}), None)
    assert list(ranks) == [1, 1], "below the last node no level was chosen"


def test_several_levels_of_a_segment_are_a_longer_pass_and_miss_more_often() -> None:
    def width(levels: int) -> int:
        tuner = tuner_of([0] * 95 + [1] * 3 + [9] * 2, levels)
        tree = tree_of([-0.1])
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            seconds = 1.0 + 0.01 * rows
            tuner.observe(tree, answer(tree, {}, seconds, rows), RoundTrip(rows, 1.0, alone=False))
        return tuner.width

    def expected(levels: int, refill: int) -> int:
        times = {width: 1.0 + 0.01 * width * levels for width in WIDTHS}
        shares = {
            width: (95 * (width > 0) + 3 * (width > 1) + 2 * (width > 9)) / 100 for width in WIDTHS
        }
        return best_width(times, shares, STAGES, refill=refill)

    assert [width(1), width(4)] == [expected(1, STAGES), expected(4, 4 * STAGES)]
    assert expected(4, 4 * STAGES) != expected(4, STAGES), "so this tells the two apart"


def test_a_pass_that_a_prune_has_overtaken_is_no_measurement() -> None:
    tuner = tuner_of([0, 0, 0, 1, 20])
    tree = tree_of([-0.1])
    tuner.observe(tree, answer(tree, {}, 1.0, 1), RoundTrip(1, 9.0, alone=True))
    tuner.observe(tree, answer(tree, {}, 9.0, 32), RoundTrip(32, 9.0, alone=True))
    before = tuner.width
    for _ in range(20):  # 64 rows left, 20 arrived: the stages may have computed as few
        tuner.observe(tree, answer(tree, {}, 1.0, 20), RoundTrip(64, 9.0, alone=False))
        tuner.observe(tree, answer(tree, {}, 1.0, 20), None)
    assert tuner.width == before == 2


def test_a_pass_over_what_a_prune_left_is_a_lower_bound_for_all_rows() -> None:
    tuner = tuner_of([100, 3])
    tree = tree_of([-0.1])
    tuner.observe(tree, answer(tree, {}, 1.0, 1), RoundTrip(1, 9.0, alone=True))
    assert tuner.width == 128, "rows seem to cost nothing"
    tuner.observe(tree, answer(tree, {}, 60.0, 20), RoundTrip(128, 9.0, alone=False))
    assert tuner.width < 128


def test_answers_that_decide_nothing_are_ignored() -> None:
    ranks = deque([0], maxlen=SAMPLES)
    tuner = WidthTuner(STAGES, 1, PassTimes(), ranks)
    tree = Tree(0)
    tree.plant(0, 0, -1)
    for _ in range(40):
        tuner.observe(tree, answer(tree, {99: 5}, 1.0), RoundTrip(1, 1.0, alone=True))
        tuner.observe(tree, answer(tree, {tree.root: 5}, 1.0), RoundTrip(1, 1.0, alone=True))
    assert list(ranks) == [0]


def test_the_next_job_begins_with_what_the_last_one_learnt() -> None:
    history = History()

    def job(*, sampled: bool) -> WidthTuner:
        strategy = SpecPipe(SpecPipeParams(width=0), STAGES)
        strategy.use_history(history, sampled=sampled)
        assert strategy.tuner is not None
        return strategy.tuner

    first = job(sampled=False)
    assert first.width == 1
    learnt = run(first, [7], 0.0001)
    assert job(sampled=False).width == learnt == 8
    assert job(sampled=True).width != learnt, "ranks differ with the temperature, times do not"
    assert job(sampled=True).width > 1


def test_a_long_prompts_time_is_its_last_chunks() -> None:
    """The slowest pass of a prompt's answer is over its last chunk, not over all its rows."""
    tuner = tuner_of([0])
    last = Answer(RunKey("j", 1), 4, (256,), (5,), seconds=0.52, rows=52)
    tuner.prefilled(RoundTrip(257, 3.0, alone=True), last)
    assert tuner._passes.widest == 52
    assert tuner._passes.at(52) == pytest.approx(0.52)


def test_jobs_of_another_shape_do_not_share_their_ranks() -> None:
    history = History()
    tuners = {}
    for children, levels in ((16, 1), (8, 1), (16, 2)):
        strategy = SpecPipe(SpecPipeParams(width=0, children=children, levels=levels), STAGES)
        strategy.use_history(history)
        assert strategy.tuner is not None
        tuners[children, levels] = strategy.tuner
    assert len({id(tuner._ranks) for tuner in tuners.values()}) == 3
    assert len({id(tuner._passes) for tuner in tuners.values()}) == 1
