"""At every pass a drafter's cache holds the context and the whole path of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.drafter_cache import CATCH_UP_ROWS, DrafterCache
from flowspec.core.drafting.drafting import Drafting, DraftingOptions
from flowspec.core.protocol.work import DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.tree.tree import Node, Tree
from flowspec.model.rows.masks import full_mask
from flowspec.model.rows.placement import ContiguousRows, Placement
from tests.core.drafting.test_drafting import growth

RUN = RunKey("j", 1)
PROMPT = (7, 8, 9)
LAST = len(PROMPT) - 1


@dataclass
class Rows:
    """A drafter's cache contents, by slot."""

    ids: list[int] = field(default_factory=list)
    store: ContiguousRows = field(default_factory=ContiguousRows)

    def compute(self, part: Part) -> Placement:
        """Move, drop and append rows, as a cache does."""
        placement = self.store.place(part)
        if placement.moves is not None:
            moved = [self.ids[source] for source in placement.moves.sources]
            self.ids[placement.moves.start : placement.moves.start + len(moved)] = moved
        assert len(self.ids) >= placement.held
        del self.ids[placement.held :]
        self.ids += part.ids
        return placement


@given(st.data(), st.lists(st.booleans(), min_size=2, max_size=3))
def test_every_drafter_catches_up_when_its_turn_comes(
    data: st.DataObject, refreshed: list[bool]
) -> None:
    tree = Tree(len(PROMPT))
    tree.plant(50, len(PROMPT), LAST)
    caches = [DrafterCache(PROMPT, refreshed=each) for each in refreshed]
    rows = [Rows() for _ in refreshed]
    committed = list(range(len(PROMPT)))
    answered = set[int]()
    first = Tree(LAST)
    first.plant(PROMPT[-1], LAST, LAST - 1)
    for cache in caches:
        cache.commit([first[LAST]], tree.root)
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.sampled_from(range(len(caches))))
        known = list(tree.nodes)
        # A growth requests no node that a drafter has already answered.
        wanted = [
            node
            for node in data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
            if node not in answered
        ]
        fed = caches[at].with_ancestors(tree, wanted) if wanted else ()
        found = caches[at].next_part(RUN, tree, fed)
        if found is not None:
            part, nodes = found
            placement = rows[at].compute(part)
            answered.update(nodes)
            above = [parents_of(node, tree, committed) for node in part.ids]
            assert list(part.parents) == above, "parents are named by id, for context rows too"
            assert set(wanted) <= set(nodes)
            before = placement.context
            assert rows[at].ids[:before] == committed[:before]
            assert part.context == len(part.ids) - len(part.answers)
            assert rows[at].ids[before : before + part.context] == committed[before:]
            check_masks(rows[at].ids, placement, part, tree, committed)
            for node in nodes:
                assert tree[node].position == part.positions[part.ids.index(node)]
                while node != tree.root:
                    node = tree[node].parent
                    assert node in rows[at].ids, "a row's ancestors are in the cache"
        for node in data.draw(st.lists(st.sampled_from(known), max_size=2, unique=True)):
            tree.add(node, data.draw(st.integers(0, 3)), -0.5)
        below = [node for node in tree.nodes if node != tree.root]
        if below and data.draw(st.booleans()):
            tip = data.draw(st.sampled_from(below))
            path = [tip]
            while path[0] != tree.root:
                path.insert(0, tree[path[0]].parent)
            accepted = [tree[node] for node in path[:-1]]
            tree.mark_waiting(path[1:])
            tree.advance(tip)
            committed += [node.id for node in accepted]
            for cache in caches:
                cache.commit(accepted, tip)


def parents_of(node: int, tree: Tree, committed: Sequence[int]) -> int:
    """The id of a row's parent; -1 for the prompt's first row."""
    if node in tree:
        return tree[node].parent
    at = committed.index(node)
    return committed[at - 1] if at else -1


def check_masks(
    ids: Sequence[int], placement: Placement, part: Part, tree: Tree, committed: Sequence[int]
) -> None:
    """Every row of the pass sees the context before it and its own path only."""
    mask = full_mask(placement.context, placement.parents, len(part.ids))
    for at, node in enumerate(part.ids):
        seen = {ids[column] for column in range(len(ids)) if mask[at, column]}
        if node in tree:
            assert seen == {*committed, *tree.path(node)}
        else:
            assert seen == set(committed[: committed.index(node) + 1])


def accepted(*ids: int) -> list[Node]:
    return [Node(node, node - 1, 5, node, 0.0, 0.0, 0) for node in ids]


def test_who_has_hidden_rows_to_keep_is_overdue_when_it_lags_by_a_pass() -> None:
    for refreshed in (False, True):
        cache = DrafterCache(PROMPT, refreshed=refreshed)
        tree = Tree(LAST)
        for last in range(LAST, CATCH_UP_ROWS - 1):
            assert not cache.overdue
            cache.commit(accepted(last), last + 1)
        cache.commit(accepted(CATCH_UP_ROWS - 1), CATCH_UP_ROWS)
        assert cache.overdue == refreshed
        assert cache.next_part(RUN, tree, ()) is not None
        assert not (cache.overdue or cache.lags)


def test_an_overdue_drafter_goes_first_and_the_one_that_drafts_loses_nothing_but_the_time() -> None:
    drafting = Drafting(RUN, PROMPT, DraftingOptions(2, refreshed=(False, True, False)))
    tree = Tree(len(PROMPT))
    passes = list[tuple[int, int]]()
    root = tree.plant(50, len(PROMPT), LAST)
    drafting.commit(accepted(LAST), root, tree)
    for _ in range(2 * CATCH_UP_ROWS):
        drafting.begin(growth(tree, 0), idle=False)
        assert drafting.needs_drafter(tree)
        asked = root
        answers = 0
        while drafting.has_work:
            work = drafting.next_work(tree)
            assert work is not None
            answers = len(work.part.answers)
            passes.append((work.drafter, len(work.part.ids)))
            drafting.done(DraftDone(((1, 2),) * answers, ((-0.1, -1.0),) * answers), tree)
        assert answers == 1, "the node the growth waits for comes last"
        root = tree.plant(50, tree[asked].position + 1, asked)
        drafting.commit(accepted(asked), root, tree)
    assert [rows for drafter, rows in passes if drafter == 1] == [CATCH_UP_ROWS] * 2
    assert all(drafter in (0, 1) for drafter, _ in passes)
