"""Slots: liveness under every interleaving, and moves carried out on a real array."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.tree.slots import Placement, SlotTable
from flowspec.core.tree.tree import Tree
from flowspec.errors import StateError
from flowspec.model.masks import full_mask


class Cache:
    """A KV cache whose rows are node ids: what a model would hold."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def carry_out(self, plan: Placement, ids: list[int]) -> None:
        if plan.moves is not None:
            assert list(plan.moves.sources) == sorted(plan.moves.sources)
            for step, source in enumerate(plan.moves.sources):  # in order, in place
                assert source >= plan.moves.start + step
                self.rows[plan.moves.start + step] = self.rows[source]
        del self.rows[plan.held :]
        self.rows += ids


class Job:
    """A random run of a job at the draft worker: an ordered list of segments and prunes.

    Prompt rows 0..2, the last one the first root. Every event knows what the draft worker held live
    when it was written.
    """

    PROMPT = 3

    def __init__(self, data: st.DataObject) -> None:
        self.tree = Tree(self.PROMPT - 1)
        self.tree.plant(0, 2, 1)
        self.context = [0, 1]
        self.events: list[tuple[str, object]] = [("segment", ([0, 1, 2], [-1, 0, 1]))]
        self.sent = {2}
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                self.send(data)
            else:
                self.commit(data)

    def send(self, data: st.DataObject) -> None:
        new = []
        if self.tree.root not in self.sent:
            new.append(self.tree.root)
        for _ in range(data.draw(st.integers(1, 4))):
            parents = sorted(self.sent | set(new))
            parent = data.draw(st.sampled_from(parents))
            node = self.tree.add(parent, data.draw(st.integers(0, 3)), -1.0)
            if node not in self.sent and node not in new:
                new.append(node)
        self.sent |= set(new)
        self.tree.select(new)
        self.events.append(("segment", (new, [self.tree[node].parent for node in new])))

    def commit(self, data: st.DataObject) -> None:
        if self.tree.root not in self.sent:
            return
        last = data.draw(st.sampled_from(sorted(self.sent)))
        accepted = self.tree.path(last)
        self.context += accepted
        children = [child for child in self.tree[last].children.values() if child in self.sent]
        if children and data.draw(st.booleans()):
            self.tree.advance(data.draw(st.sampled_from(children)))
        else:
            self.tree.plant(0, self.tree[last].position + 1, last)
        self.sent = {node.id for node in self.tree if node.id in self.sent}
        self.events.append(("prune", (accepted, self.tree.root, len(self.context), set(self.sent))))


def run_stage(
    events: list[tuple[str, object]], late: list[int]
) -> tuple[SlotTable, Cache, set[int]]:
    """Read events in order, but compute each segment only ``late`` events after it was read."""
    table = SlotTable(Job.PROMPT)
    cache = Cache()
    seen = set()
    waiting: list[tuple[int, list[int], list[int]]] = []

    def compute(ids: list[int], parents: list[int]) -> None:
        alive: list[int] = []
        for node, parent in zip(ids, parents, strict=True):
            if table.is_live(node, parent) or parent in alive:
                alive.append(node)
        kept = [parents[ids.index(node)] for node in alive]
        plan = table.plan(alive, kept, sum(node < Job.PROMPT - 1 for node in alive))
        cache.carry_out(plan, alive)
        seen.update(alive)

    for number, (kind, event) in enumerate(events):
        if kind == "segment":
            ids, parents = event  # type: ignore[misc]
            waiting.append((number + late[number], ids, parents))
        else:
            accepted, root, _, _ = event  # type: ignore[misc]
            while (
                waiting and not set(accepted) <= seen
            ):  # a verdict exists only once its rows were computed
                compute(*waiting.pop(0)[1:])
            table.prune(accepted, root)
        while waiting and waiting[0][0] <= number:
            compute(*waiting.pop(0)[1:])
    for _, ids, parents in waiting:
        compute(ids, parents)
    return table, cache, seen


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_every_interleaving_leaves_the_same_live_rows(data: st.DataObject) -> None:
    job = Job(data)
    late = [data.draw(st.integers(0, 4), label="lateness") for _ in job.events]
    table, cache, _ = run_stage(job.events, late)
    assert set(table.live) == job.sent
    assert table.context == len(job.context)
    table.plan([], [])
    plan = table.plan([], [])
    cache.carry_out(plan, [])
    prompt, _, _ = run_stage(job.events, [0] * len(job.events))
    assert set(prompt.live) == set(table.live)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_moves_keep_context_then_live_rows_and_masks_see_the_path(data: st.DataObject) -> None:
    job = Job(data)
    late = [data.draw(st.integers(0, 4)) for _ in job.events]
    table, cache, _ = run_stage(job.events, late)
    plan = table.plan([], [])
    cache.carry_out(plan, [])
    assert cache.rows[: table.context] == job.context
    assert cache.rows[table.context :] == list(table.live)
    if not table.live:
        return
    mask = full_mask(plan.context, plan.parents, len(plan.parents))
    for at, node in enumerate(table.live):
        visible = {cache.rows[column] for column in range(len(cache.rows)) if mask[at, column]}
        assert visible == set(job.context) | set(job.tree.path(node)) & set(table.live)


def test_a_late_sibling_of_an_accepted_node_is_dead() -> None:
    table = SlotTable(1)
    table.plan([0], [-1])
    table.plan([1, 2], [0, 0])
    table.prune([0, 1], root=5)
    assert not table.is_live(3, 0)
    assert not table.is_live(4, 1), "context ids never make a child live"
    assert table.is_live(5, 1)
    assert table.live == ()


def test_a_segment_pruned_to_a_lone_row_sees_only_its_path() -> None:
    """The public code masks nothing for a lone row, which then sees its cousins."""
    table = SlotTable(1)
    table.plan([0], [-1])
    table.prune([0], root=1)
    table.plan([1, 2, 3], [0, 1, 1])
    plan = table.plan([4], [2])
    assert full_mask(plan.context, plan.parents, 1).tolist() == [[True, True, True, False, True]]


def test_prunes_compose_before_one_move() -> None:
    table = SlotTable(1)
    cache = Cache()
    cache.carry_out(table.plan([0], [-1]), [0])
    table.prune([0], root=1)
    ids = [1, 2, 3, 4, 5, 6]
    cache.carry_out(table.plan(ids, [0, 1, 1, 2, 3, 5]), ids)
    table.prune([1], root=3)
    table.prune([3], root=5)
    cache.carry_out(table.plan([7], [6]), [7])
    assert cache.rows == [0, 1, 3, 5, 6, 7]
    assert (table.context, table.live) == (3, (5, 6, 7))


def test_context_rows_may_not_follow_tree_rows() -> None:
    table = SlotTable(1)
    table.plan([0], [-1])
    with pytest.raises(StateError, match="behind tree rows"):
        table.plan([1], [-1], context_rows=1)


def test_a_drafter_may_lag_behind_what_was_accepted() -> None:
    table = SlotTable(2)
    table.plan([0, 1], [-1, 0], context_rows=2)
    table.prune([1], root=2)
    table.plan([2], [1])
    table.prune([2, 3], root=9)  # 3 was accepted, but the drafter never ran it
    assert table.context == 3
    plan = table.plan([3, 9], [2, 3], context_rows=1)
    assert (plan.context, plan.held, plan.parents) == (3, 3, (-1, 0))
