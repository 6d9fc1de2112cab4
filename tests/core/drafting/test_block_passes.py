"""Passes of a block drafter: which nodes they answer, and where further levels go."""

from __future__ import annotations

from flowspec.core.drafting.drafter_cache import CATCH_UP_ROWS
from flowspec.core.drafting.drafting import MOST_SOURCES, Drafting, DraftingOptions
from flowspec.core.drafting.layered_growth import StaticGrowth
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.protocol.work import BlockDone, BlockDraft, Draft, LevelProposals
from flowspec.core.run.key import RunKey
from flowspec.core.tree.tree import Expansion, Tree
from tests.core.drafting.test_drafting import RUN, nodes, planted

LEVELS = 4


def drafting(prefix: int = 2, *, redrafts: bool = False) -> Drafting:
    options = DraftingOptions(3, refreshed=(True,), levels=(LEVELS,), redrafts=redrafts)
    return Drafting(RUN, range(prefix), options)


def answer(work: Draft | None) -> BlockDone:
    """Level k proposes 10 k + 1 to 10 k + 3 below every asked node."""
    assert isinstance(work, BlockDraft)
    assert work.levels == LEVELS
    levels = [
        LevelProposals(tuple(10 * level + at for at in (1, 2, 3)), (-0.5, -1.0, -2.0))
        for level in range(1, LEVELS + 1)
    ]
    rows = len(work.part.answers)
    return BlockDone(
        (levels[0].tokens,) * rows, (levels[0].values,) * rows, below=(tuple(levels[1:]),) * rows
    )


def tens(tree: Tree, node: int) -> int | None:
    """The level whose proposals ``node`` has."""
    expansion = tree[node].expansion
    return None if expansion is None else expansion.tokens[0] // 10


def path_of(tree: Tree, length: int) -> PathGrowth:
    return PathGrowth(tree, tree.root, length, lambda tree, path: [path])


def test_a_growth_as_deep_as_a_block_takes_one_pass() -> None:
    one = drafting()
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    assert not one.has_work, "context rows wait for a pass that answers"
    one.begin(StaticGrowth(tree, [2] * LEVELS), idle=False)
    assert one.needs_drafter(tree)
    work = one.next_work(tree)
    assert work is not None
    assert (work.part.ids, work.part.context) == ((0, 1, tree.root), 2)
    assert work.rows == 2 + 1 + LEVELS
    one.done(answer(work), tree)
    assert not one.needs_drafter(tree)
    (segment,) = one.collect(tree)
    assert len(segment) == 2 ** (LEVELS + 1) - 1
    assert {tree[node].token // 10 for node in segment if node != tree.root} == {1, 2, 3, 4}
    assert not one.has_work


def test_deeper_nodes_are_asked_with_their_whole_path() -> None:
    one = drafting()
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    one.begin(path_of(tree, 6), idle=False)
    assert one.needs_drafter(tree)
    one.done(answer(one.next_work(tree)), tree)
    assert one.needs_drafter(tree)
    work = one.next_work(tree)
    assert work is not None
    tip = max(tree.nodes)
    assert work.part.ids == tuple(tree.path(tip))
    assert work.part.answers == (LEVELS,)
    assert work.part.context == 0
    assert work.rows == LEVELS + 1 + LEVELS
    one.done(answer(work), tree)
    assert not one.needs_drafter(tree)
    assert [tree[node].token // 10 for node in sorted(tree.nodes)[1:]] == [1, 2, 3, 4, 1, 2]


def test_existing_descendants_get_the_proposals_of_their_level() -> None:
    tree = planted(2)
    child = tree.add(tree.root, 5, -0.1)
    drafted = tree.add(child, 6, -0.1)
    below = tree.add(drafted, 7, -0.1)
    own = Expansion((99,), (-0.1,))
    tree.expand(drafted, own)
    levels = [Expansion((10 * level,), (-0.1,)) for level in (3, 2, 1)]
    chain = levels[0]
    for level in levels[1:]:
        chain = Expansion(level.tokens, level.values, below=chain)
    tree.expand(tree.root, chain)
    assert [tens(tree, node) for node in (tree.root, child, below)] == [1, 2, None]
    assert tree[drafted].expansion is own
    beside = tree.add(tree.add(child, 8, -0.2), 9, -0.2)
    assert tens(tree, beside) is None
    assert tens(tree, tree[beside].parent) == 3


def test_a_verdict_during_a_pass_leaves_the_levels_below_the_new_root() -> None:
    one = drafting()
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    old = tree.root
    child = tree.add(old, 5, -0.1)
    grandchild = tree.add(child, 6, -0.1)
    tree.mark_waiting([child, grandchild])
    one.begin(path_of(tree, 6), idle=False)
    assert one.needs_drafter(tree)
    work = one.next_work(tree)
    assert work is not None
    assert work.part.ids[-1] == old
    accepted = [tree[old]]
    tree.advance(child)
    one.commit(accepted, child, tree)
    accepted = [tree[child]]
    tree.advance(grandchild)
    one.commit(accepted, grandchild, tree)
    one.done(answer(work), tree)
    assert tens(tree, grandchild) == 3


def test_a_verdict_that_plants_a_root_voids_the_pass() -> None:
    one = drafting()
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    one.begin(path_of(tree, 6), idle=False)
    assert one.needs_drafter(tree)
    work = one.next_work(tree)
    old = tree[tree.root]
    root = tree.plant(9, 3, old.id)
    one.commit([old], root, tree)
    one.done(answer(work), tree)
    assert tree[root].expansion is None
    one.begin(path_of(tree, 2), idle=False)
    assert one.needs_drafter(tree)
    again = one.next_work(tree)
    assert again is not None
    assert (again.part.ids, again.part.context) == ((old.id, root), 1)


def test_proposals_are_dropped_at_a_verdict_if_the_strategy_drafts_anew() -> None:
    one = drafting(redrafts=True)
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    one.begin(StaticGrowth(tree, [1, 1]), idle=False)
    assert one.needs_drafter(tree)
    one.done(answer(one.next_work(tree)), tree)
    assert not one.needs_drafter(tree)
    (segment,) = one.collect(tree)
    tree.mark_waiting(segment)
    accepted = [tree[tree.root]]
    tree.advance(segment[1])
    one.commit(accepted, segment[1], tree)
    assert all(node.expansion is None for node in tree)


def test_a_level_is_the_source_of_its_candidates() -> None:
    options = DraftingOptions(3, refreshed=(False, True), levels=(0, LEVELS), calibrates_all=True)
    one = Drafting(RunKey("j", 1), range(2), options)
    tree = planted(2)
    one.commit(nodes((1, 8)), tree.root, tree)
    one.begin(path_of(tree, LEVELS), idle=False, drafter=1)
    assert one.needs_drafter(tree)
    one.done(answer(one.next_work(tree)), tree)
    expansion = tree[tree.root].expansion
    for level in range(LEVELS):
        assert expansion is not None
        assert {cell // 16 for cell in expansion.cells} == {MOST_SOURCES + level}
        expansion = expansion.below
    assert expansion is None


def test_context_rows_alone_are_computed_once_they_fill_a_pass() -> None:
    length = CATCH_UP_ROWS + 10
    one = drafting(length)
    tree = planted(length)
    one.commit(nodes((length - 1, 0)), tree.root, tree)
    assert one.has_work
    first = one.next_work(tree)
    assert first is not None
    assert (len(first.part.ids), first.part.answers) == (CATCH_UP_ROWS, ())
    one.done(BlockDone((), ()), tree)
    assert not one.has_work
