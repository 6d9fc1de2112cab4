"""Which rows are live, over all interleavings of segments and prunes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.tree.live_rows import LiveRows
from flowspec.errors import StateError
from tests.core.tree.random_runs import PROMPT, RandomRun, RandomStage
from tests.marks import examples


class Holder:
    """A model's rows by id, derived from the passes alone."""

    def __init__(self) -> None:
        self.context: list[int] = []
        self.tree: dict[int, int] = {}

    def take(self, part: Part) -> None:
        if part.pruned is not None:
            kept = (*part.pruned.accepted, *part.pruned.live)
            held = [node for node in self.tree if node in kept]
            assert list(kept) == held, "kept rows stay in the order they were computed"
            self.context += part.pruned.accepted
            self.tree = {node: self.tree[node] for node in part.pruned.live}
        assert not (part.context and self.tree)
        self.context += part.ids[: part.context]
        rows = zip(part.ids[part.context :], part.parents[part.context :], strict=True)
        for node, parent in rows:
            assert parent in self.tree or parent in (-1, self.context[-1])
            self.tree[node] = parent


@given(st.data())
@settings(max_examples=examples(400), deadline=None)
def test_every_interleaving_leaves_the_same_live_rows(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    assert set(stage.rows.tree) == run.sent
    assert stage.rows.context == len(run.context)
    assert len(stage.rows) == len(run.context) + len(run.sent)
    assert stage.rows.root == run.tree.root
    prompt_one = RandomStage(run, [0] * len(run.events))
    assert set(prompt_one.rows.tree) == set(stage.rows.tree)


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_passes_say_all_that_becomes_of_a_models_rows(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    stage.empty_pass()
    holder = Holder()
    for part in stage.parts:
        holder.take(part)
    assert holder.context == run.context
    assert list(holder.tree) == list(stage.rows.tree)
    assert holder.tree == {node: run.tree[node].parent for node in stage.rows.tree}


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_pass_prunes_once(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    stage.empty_pass()
    assert stage.empty_pass().pruned is None


def test_a_late_sibling_of_an_accepted_node_is_dead() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1])
    rows.begin_pass([1, 2], [0, 0])
    rows.prune([0, 1], root=5)
    assert rows.live([3], [0]) == []
    assert rows.live([4], [1]) == [], "context ids never make a child live"
    assert rows.live([5], [1]) == [0]
    assert list(rows.tree) == []


def test_of_a_segment_only_what_hangs_from_live_rows_is_left() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1])
    rows.begin_pass([1, 2], [0, 0])
    rows.prune([0], root=1)
    assert rows.live([3, 4, 5, 6, 7], [1, 2, 3, 4, 0]) == [0, 2]


def test_prunes_compose_before_one_pass() -> None:
    rows = LiveRows(1)
    assert rows.begin_pass([0], [-1]) is None
    rows.prune([0], root=1)
    ids = [1, 2, 3, 4, 5, 6]
    assert rows.begin_pass(ids, [0, 1, 1, 2, 3, 5]) == Pruned((0,), ())
    rows.prune([1], root=3)
    rows.prune([3], root=5)
    assert rows.begin_pass([7], [6]) == Pruned((1, 3), (5, 6))
    assert rows.context == 3
    assert list(rows.tree) == [5, 6, 7]


def test_a_prune_that_accepts_nothing_here_is_still_one() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1], context=1)
    rows.begin_pass([1], [0])
    rows.prune([], root=9)
    assert rows.begin_pass([], []) == Pruned((), ())
    assert len(rows) == 1


def test_context_rows_may_not_follow_tree_rows() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1])
    with pytest.raises(StateError, match="behind tree rows"):
        rows.begin_pass([1], [-1], context=1)


def test_a_drafter_may_lag_behind_what_was_accepted() -> None:
    rows = LiveRows(2)
    rows.begin_pass([0, 1], [-1, 0], context=2)
    rows.prune([1], root=2)
    rows.begin_pass([2], [1])
    rows.prune([2, 3], root=9)  # 3 was accepted, but the drafter never ran it
    assert rows.context == 3
    assert rows.begin_pass([3, 9], [2, 3], context=1) == Pruned((2,), ())
    assert rows.context == 4
    assert list(rows.tree) == [9]


def test_accepted_rows_have_to_be_a_path() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1])
    rows.begin_pass([1, 2], [0, 0])
    with pytest.raises(StateError, match="accepted row 2 is not the child of 1"):
        rows.prune([0, 1, 2], root=3)


def test_a_forgotten_tree_takes_accepted_rows_along() -> None:
    rows = LiveRows(1)
    rows.begin_pass([0], [-1], context=1)
    rows.begin_pass([1, 2], [0, 1])
    rows.forget_tree(7)
    assert (rows.context, list(rows.tree), rows.root) == (1, [], 7)
    assert rows.begin_pass([1, 2], [0, 1], context=2) == Pruned((), ())
    assert rows.context == 3


def test_prompt_rows_are_live_whatever_the_root_is() -> None:
    rows = LiveRows(PROMPT)
    assert rows.live([0, 1, 2, 3], [-1, 0, 1, 2]) == [0, 1, 2, 3]
