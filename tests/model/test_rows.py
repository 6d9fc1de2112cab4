"""Places of rows: moves applied to a real array, over all orders of segments and prunes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.sampling import Sampling
from flowspec.core.tree.live_rows import LiveRows
from flowspec.errors import StateError
from flowspec.model.rows import placement as rows
from flowspec.model.rows.kv import TreeCache
from flowspec.model.rows.masks import full_mask
from flowspec.model.rows.placement import ContiguousRows, Moves, Placement
from tests.core.tree.random_runs import RUN, RandomRun, RandomStage
from tests.marks import examples
from tests.toy_model import ToyStage, ToyTarget


class Cache:
    """A KV cache whose rows are node ids."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.store = ContiguousRows()

    def take(self, part: Part) -> Placement:
        """Place a pass's rows, apply the moves, and write the rows."""
        placement = self.store.place(part)
        if placement.moves is not None:
            assert list(placement.moves.sources) == sorted(placement.moves.sources)
            for step, source in enumerate(placement.moves.sources):  # in order, in place
                assert source >= placement.moves.start + step
                self.rows[placement.moves.start + step] = self.rows[source]
        del self.rows[placement.held :]
        self.rows += part.ids
        return placement


class Model:
    """A cache driven by the live rows, as in a stage or a drafter."""

    def __init__(self, prompt_length: int) -> None:
        self.live = LiveRows(prompt_length)
        self.cache = Cache()

    def compute(self, ids: list[int], parents: list[int], context: int = 0) -> Placement:
        pruned = self.live.begin_pass(ids, parents, context)
        return self.cache.take(part(ids, parents, context, pruned))


def part(
    ids: list[int], parents: list[int], context: int = 0, pruned: Pruned | None = None
) -> Part:
    rows = tuple(ids)
    return Part(RUN, 0, rows, tuple(parents), rows, rows, (), context, pruned)


@given(st.data())
@settings(max_examples=examples(400), deadline=None)
def test_moves_keep_context_then_live_rows_and_masks_see_the_path(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    stage.empty_pass()
    cache = Cache()
    for one in stage.parts:
        placement = cache.take(one)
    context = stage.rows.context
    live = list(stage.rows.tree)
    assert placement.context == context
    assert cache.rows[:context] == run.context
    assert cache.rows[context:] == live
    if not live:
        return
    mask = full_mask(placement.context, placement.parents, len(placement.parents))
    for at, node in enumerate(live):
        visible = {cache.rows[column] for column in range(len(cache.rows)) if mask[at, column]}
        assert visible == set(run.context) | set(run.tree.path(node)) & set(live)


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_every_pass_sees_the_context_and_each_rows_own_path(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    cache = Cache()
    above: dict[int, int] = {}
    for one in stage.parts:
        placement = cache.take(one)
        above |= zip(one.ids, one.parents, strict=True)
        mask = full_mask(placement.context, placement.parents, len(one.ids))
        for at, node in enumerate(one.ids):
            visible = {cache.rows[column] for column in range(len(cache.rows)) if mask[at, column]}
            path = set()
            while node >= 0:
                path.add(node)
                node = above[node]
            assert visible == path, "the context is the path to the root, and so is the tree's part"


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_a_pass_that_prunes_nothing_moves_nothing(data: st.DataObject) -> None:
    run = RandomRun(data)
    stage = RandomStage(run, run.lateness(data))
    stage.empty_pass()
    cache = Cache()
    for one in stage.parts:
        placement = cache.take(one)
        assert placement.moves is None or one.pruned is not None
    rows = list(cache.rows)
    assert cache.take(stage.empty_pass()).moves is None
    assert cache.rows == rows


def test_a_segment_pruned_to_a_lone_row_sees_only_its_path() -> None:
    """The published code uses no mask for a lone row, which then sees its cousins."""
    model = Model(1)
    model.compute([0], [-1])
    model.live.prune([0], root=1)
    model.compute([1, 2, 3], [0, 1, 1])
    placement = model.compute([4], [2])
    mask = full_mask(placement.context, placement.parents, 1)
    assert mask.tolist() == [[True, True, True, False, True]]


def test_prunes_compose_before_one_move() -> None:
    model = Model(1)
    model.compute([0], [-1])
    model.live.prune([0], root=1)
    model.compute([1, 2, 3, 4, 5, 6], [0, 1, 1, 2, 3, 5])
    model.live.prune([1], root=3)
    model.live.prune([3], root=5)
    placement = model.compute([7], [6])
    assert model.cache.rows == [0, 1, 3, 5, 6, 7]
    assert (placement.context, placement.held, placement.parents) == (3, 5, (-1, 0, 1))


def test_context_rows_may_not_follow_tree_rows() -> None:
    store = ContiguousRows()
    store.place(part([0], [-1]))
    with pytest.raises(StateError, match="behind tree rows"):
        store.place(part([1], [-1], context=1))


def test_a_drafter_may_lag_behind_what_was_accepted() -> None:
    model = Model(2)
    model.compute([0, 1], [-1, 0], context=2)
    model.live.prune([1], root=2)
    model.compute([2], [1])
    model.live.prune([2, 3], root=9)  # 3 was accepted, but the drafter never ran it
    placement = model.compute([3, 9], [2, 3], context=1)
    assert (placement.context, placement.held, placement.parents) == (3, 3, (-1, 0))
    assert model.cache.rows == [0, 1, 2, 3, 9]


def test_rows_to_keep_have_to_be_held() -> None:
    store = ContiguousRows()
    store.place(part([0], [-1]))
    with pytest.raises(StateError, match="row 1 is to be kept, but is not held here"):
        store.place(part([], [], pruned=Pruned((0,), (1,))))


def test_rows_to_keep_have_to_be_held_parents_first() -> None:
    store = ContiguousRows()
    store.place(part([0, 1], [-1, 0]))
    with pytest.raises(StateError, match="parents first"):
        store.place(part([], [], pruned=Pruned((1, 0), ())))


def test_a_row_is_held_once() -> None:
    store = ContiguousRows()
    store.place(part([0, 1], [-1, 0]))
    with pytest.raises(StateError, match="row 1 is to be computed, but is held here already"):
        store.place(part([1], [0]))
    store = ContiguousRows()
    with pytest.raises(StateError, match="row 0 is to be computed"):
        store.place(part([0, 0], [-1, -1]))


def test_the_example_of_the_docstring() -> None:
    store = ContiguousRows()
    assert store.place(part([0, 1], [-1, 0], context=2)).held == 0
    assert store.place(part([2, 3, 4, 5], [1, 2, 2, 4])) == Placement(2, 2, None, (-1, 0, 0, 2))
    last = store.place(part([6], [5], pruned=Pruned((2,), live=(4, 5))))
    assert last == Placement(3, 5, Moves(3, (4, 5)), (-1, 0, 1))


def test_every_cache_takes_its_layout_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ContiguousRows] = []

    def counted(held: int = 0) -> ContiguousRows:
        made.append(ContiguousRows(held))
        return made[-1]

    monkeypatch.setattr(rows, "ContiguousRows", counted)
    TreeCache.allocate(1, 1, 8, 2, torch.float32)
    assert len(made) == 1
    ToyStage(ToyTarget(), 1, 1).allocate(RUN, 8, Sampling(), Returns())
    assert len(made) == 2
