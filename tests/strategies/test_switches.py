"""Options that switch a mechanism off or bound it: what a strategy grows, and when."""

from __future__ import annotations

import pytest

from flowspec.core.drafting.growth import Growth
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.strategy import Occasion, View
from flowspec.core.tree.tree import Expansion, Tree
from flowspec.strategies import STRATEGIES, build
from flowspec.strategies.chain import MOST_IN_FLIGHT, WindowHistory

STAGES = 3


def view(bandwidth_delay: int = 0) -> View:
    tree = Tree(5)
    tree.mark_sent([tree.plant(token=7, position=4, parent=3)])
    return View(
        tree=tree,
        in_flight=0,
        waiting=0,
        bandwidth_delay=bandwidth_delay,
        decoding=True,
        draft_pass_seconds=0.0,
        decoded=0,
        decode_seconds=0.0,
    )


@pytest.mark.parametrize(
    ("options", "grows"),
    [
        ("", {Occasion.ROUND, Occasion.VERDICT, Occasion.IDLE}),
        (":merge=off", {Occasion.ROUND, Occasion.IDLE}),
        (":expand=off", {Occasion.ROUND, Occasion.VERDICT}),
        (":merge=off,expand=off", {Occasion.ROUND}),
    ],
)
def test_flowspec_grows_where_its_mechanisms_are_on(options: str, grows: set[Occasion]) -> None:
    strategy = build(f"flowspec{options}", STAGES)
    now = view()
    assert strategy.grow(now, Occasion.ROUND) is not None
    found = {occasion for occasion in Occasion if strategy.grow(now, occasion) is not None}
    assert found == grows


def test_a_static_tree_is_drafted_once_per_round() -> None:
    strategy = build("static_tree", STAGES)
    now = view()
    overlapped = build("static_tree:overlap=on", STAGES)
    answer = Answer(RunKey("j", 1), 1, (4,), (7,))
    for one in (strategy, overlapped):
        assert one.grow(now, Occasion.ROUND) is not None
        one.observe_answer(now, answer, RoundTrip(rows=1, seconds=2.0, alone=True))
    assert strategy.grow(now, Occasion.IDLE) is None
    assert overlapped.grow(now, Occasion.IDLE) is not None


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("pipedec", STAGES),
        ("pipedec:groups=2", 2),
        ("pipedec:groups=9", STAGES),
        ("specpipe", STAGES),
        ("specpipe:in_flight=9", 9),
        ("specpipe:in_flight=1", 1),
    ],
)
def test_as_many_segments_are_in_flight_as_an_option_says(text: str, segments: int) -> None:
    assert build(text, STAGES).max_in_flight == segments


@pytest.mark.parametrize(
    ("text", "bandwidth_delay", "windows"),
    [
        ("chain", 0, STAGES),
        ("chain", 1, STAGES),
        ("chain", 7, 7),
        ("chain", 1000, MOST_IN_FLIGHT),
        ("chain:in_flight=2", 7, 2),
    ],
)
def test_a_chain_has_as_many_windows_in_flight_as_hide_the_round_trip(
    text: str, bandwidth_delay: int, windows: int
) -> None:
    strategy = build(text, STAGES)
    strategy.grow(view(bandwidth_delay), Occasion.IDLE)
    assert strategy.max_in_flight == windows


def test_a_chain_begins_with_the_windows_of_the_job_before() -> None:
    history = History()
    for text, begins, measured in (
        ("chain", STAGES, 7),
        ("chain", 7, 9),
        ("chain:in_flight=2", 2, 5),
    ):
        strategy = build(text, STAGES)
        strategy.use_history(history)
        strategy.grow(view(0), Occasion.ROUND)
        assert strategy.max_in_flight == begins
        strategy.grow(view(measured), Occasion.IDLE)
    assert history.get(WindowHistory).in_flight == {2: 9}, "a number that was given says nothing"


def drafted(tree: Tree, growth: Growth | None, most: int) -> int:
    """Draft up to ``most`` tokens of ``growth``; how many it asked for."""
    assert growth is not None
    for count in range(most):
        pending = growth.proceed(tree)
        if not pending:
            return count
        for node in pending:
            tree.expand(node, Expansion((9,), (-0.1,)))
    growth.proceed(tree)
    return most


@pytest.mark.parametrize(("lookahead", "ahead"), [(1, 0), (2, 1), (4, 3)])
def test_a_middle_model_starts_when_the_draft_is_far_enough_ahead(
    lookahead: int, ahead: int
) -> None:
    for tokens in range(1, 6):
        strategy = build(f"pipespec:window=8,lookahead={lookahead}", STAGES)
        now = view()
        drafted(now.tree, strategy.grow(now, Occasion.ROUND), tokens)
        starts = strategy.next_for_middle(now, 1, now.tree.root) is not None
        assert starts == (tokens >= ahead), tokens


def test_a_draft_runs_at_most_a_window_ahead_of_the_target() -> None:
    strategy = build("pipespec:window=4", STAGES)
    now = view()
    tree = now.tree
    assert drafted(tree, strategy.grow(now, Occasion.ROUND), 20) == 4
    assert strategy.grow(now, Occasion.IDLE) is None
    (child,) = tree[tree.root].children.values()
    tree.mark_waiting([child])
    tree.advance(child)
    assert drafted(tree, strategy.grow(now, Occasion.IDLE), 20) == 1


def test_layered_and_best_first_trees_keep_what_was_drafted_before_a_verdict() -> None:
    kept = {name for name in STRATEGIES if not build(name, STAGES).redrafts}
    lossy = {"specpipe_lossy_relaxed", "specpipe_lossy_nucleus"}
    assert kept == {"pipedec", "pipedec_head", "specpipe", "specpipe_db", "auto", *lossy}
    assert not build("static_tree:overlap=on", STAGES).redrafts
