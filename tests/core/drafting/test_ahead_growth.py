"""Trees drafted ahead begin at the likeliest tokens that T lacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.ahead_growth import AheadGrowth
from flowspec.core.drafting.layered_growth import StaticGrowth
from flowspec.core.tree.tree import Expansion, Tree

WIDTH = 3


def sent_tree(branching: tuple[int, ...]) -> Tree:
    """A static tree in flight; all but its leaves are expanded."""
    tree = Tree(0)
    tree.plant(1, 0, -1)
    growth = StaticGrowth(tree, branching)
    while wanted := growth.proceed(tree):
        expand(tree, wanted)
    (segment,) = growth.segments(tree)
    tree.mark_waiting(segment)
    tree.mark_sent(segment)
    return tree


def expand(tree: Tree, nodes: tuple[int, ...]) -> None:
    for node in nodes:
        step = 0.1 + 0.07 * (node * 7 % 5)
        values = tuple(-step * (rank + 1) for rank in range(WIDTH))
        tree.expand(node, Expansion(tuple(range(10, 10 + WIDTH)), values))


def drafted_ahead(tree: Tree, branching: tuple[int, ...], roots: int, passes: int) -> int:
    """Draft ahead to the end; how many passes it took."""
    growth = AheadGrowth(tree, branching, roots, passes)
    taken = 0
    while wanted := growth.proceed(tree):
        assert all(tree[node].expansion is None for node in wanted)
        expand(tree, wanted)
        taken += 1
    growth.rebase(tree)
    assert growth.segments(tree) == []
    return taken


SHAPES = st.lists(st.integers(1, WIDTH), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 12))
def test_the_roots_are_the_likeliest_tokens_that_the_tree_lacks(
    shape: tuple[int, ...], roots: int
) -> None:
    tree = sent_tree(shape)
    drafted_ahead(tree, shape, roots, passes=len(shape) + 1)
    chosen = [node for node in tree if not node.selected and tree[node.parent].selected]
    lacking = [
        node.score + value
        for node in tree.selected()
        if node.expansion is not None
        for token, value in zip(node.expansion.tokens, node.expansion.values, strict=True)
        if (child := tree.child(node.id, token)) is None or not tree[child].selected
    ]
    best = sorted(lacking, reverse=True)[:roots]
    assert sorted((node.score for node in chosen), reverse=True) == best


@given(SHAPES, st.integers(1, 12))
def test_each_tree_ahead_is_the_one_that_a_round_from_its_root_would_draft(
    shape: tuple[int, ...], roots: int
) -> None:
    tree = sent_tree(shape)
    drafted_ahead(tree, shape, roots, passes=len(shape) + 1)
    root = next(node for node in tree if not node.selected and tree[node.parent].selected)
    before = set(tree.subtree(root.id))
    tree.advance(root.id)
    growth = StaticGrowth(tree, shape)
    assert growth.proceed(tree) == (), "nothing is left to draft"
    (segment,) = growth.segments(tree)
    assert set(segment) == before


@given(SHAPES, st.integers(1, 5))
def test_it_takes_no_more_passes_than_it_may(shape: tuple[int, ...], passes: int) -> None:
    taken = drafted_ahead(sent_tree(shape), shape, 4, passes)
    assert taken == min(passes, len(shape) + 1) if passes > 1 else taken == 0


def test_of_equals_the_earlier_parents_comes_first() -> None:
    tree = Tree(0)
    root = tree.plant(1, 0, -1)
    tree.expand(root, Expansion((2, 3, 4), (-0.0, -1.0, -1.0)))
    child = tree.add(root, 2, -0.0)
    tree.mark_waiting([root, child])
    tree.mark_sent([root, child])
    tree.expand(child, Expansion((5, 6), (-1.0, -1.0)))
    drafted_ahead(tree, (1,), 3, passes=2)
    chosen = [
        (node.parent, node.token)
        for node in tree
        if not node.selected and tree[node.parent].selected
    ]
    assert chosen == [(root, 3), (root, 4), (child, 5)]


def test_a_drafter_that_proposes_nothing_leaves_nothing_ahead() -> None:
    tree = Tree(0)
    root = tree.plant(1, 0, -1)
    tree.mark_sent([root])
    growth = AheadGrowth(tree, (1, 1), 4, 3)
    assert growth.proceed(tree) == (root,)
    tree.expand(root, Expansion((), ()))
    assert growth.proceed(tree) == ()
    assert len(tree) == 1
