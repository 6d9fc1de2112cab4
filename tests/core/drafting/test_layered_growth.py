"""Layers, static trees and paths: chosen as in PipeDec, SpecInfer and plain chains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.layered_growth import LayerGrowth, StaticGrowth, deepest
from flowspec.core.drafting.path_growth import PathGrowth
from flowspec.core.tree.tree import Expansion, Tree


def planted() -> Tree:
    tree = Tree(0)
    tree.plant(1, 0, -1)
    return tree


def draft(tree: Tree, nodes: tuple[int, ...], width: int = 4) -> None:
    """Tokens from 2 on in descending likelihood; the values differ by node."""
    for node in nodes:
        step = 0.1 + 0.05 * (node % 5)
        tree.expand(
            node,
            Expansion(tuple(range(2, 2 + width)), tuple(-step * (at + 1) for at in range(width))),
        )


def grow(growth: LayerGrowth | StaticGrowth | PathGrowth, tree: Tree) -> list[list[int]]:
    while wanted := growth.proceed(tree):
        draft(tree, wanted)
    return growth.segments(tree)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), min_size=1, max_size=6))
def test_a_layer_is_the_best_of_all_candidates_grouped_by_parent(
    shape: list[tuple[int, int]],
) -> None:
    tree = planted()
    tree.mark_waiting([tree.root])
    for width, children in shape:
        bottom = deepest(tree)
        (layer,) = grow(LayerGrowth(tree, width, children), tree)
        candidates = sorted(
            (
                tree[node].score + value
                for node in bottom
                for value in tree[node].expansion.values[:children]
            ),  # type: ignore[union-attr]
            reverse=True,
        )
        assert sorted((tree[node].score for node in layer), reverse=True) == candidates[:width]
        parents = [tree[node].parent for node in layer]
        assert parents == sorted(parents), "breadth first: grouped by parent"
        tree.mark_waiting(layer)
        tree.check()
        assert deepest(tree) == sorted(layer)


def test_the_last_layer_is_chosen_when_it_is_asked_for_not_when_it_was_drafted() -> None:
    """After a verdict in between, the full width is available to valid nodes."""
    tree = planted()
    (first,) = grow(LayerGrowth(tree, 2, 2), tree)
    tree.mark_waiting(first)
    growth = LayerGrowth(tree, 2, 4)
    draft(tree, growth.proceed(tree))
    survivor = first[1]
    tree.advance(survivor)
    growth.rebase(tree)
    (layer,) = growth.segments(tree)
    assert len(layer) == 2
    assert {tree[node].parent for node in layer} == {survivor}


def test_after_a_prune_the_bottom_is_the_deepest_that_survived() -> None:
    tree = planted()
    (first,) = grow(LayerGrowth(tree, 2, 2), tree)
    tree.mark_waiting(first)
    below = tree.add(first[0], 9, -0.1)
    tree.mark_waiting([below])
    assert deepest(tree) == [below]
    tree.advance(first[1])
    assert deepest(tree) == [first[1]]


def test_several_levels_come_as_one_segment() -> None:
    tree = planted()
    (segment,) = grow(LayerGrowth(tree, 3, 2, levels=3), tree)
    depths = [tree[node].depth for node in segment]
    assert depths == sorted(depths)
    assert [depths.count(level) for level in (1, 2, 3)] == [2, 3, 3]


def test_a_drafter_that_knows_nothing_ends_a_layer_and_a_path() -> None:
    tree = planted()
    tree.expand(tree.root, Expansion((), ()))
    assert grow(LayerGrowth(tree, 4, 4), tree) == []
    assert grow(PathGrowth(tree, tree.root, 5, lambda tree, path: [path]), tree) == [[]]
    assert grow(StaticGrowth(tree, (1, 2)), tree) == [[tree.root]]


def test_a_static_tree_gives_every_node_of_a_level_its_children() -> None:
    tree = planted()
    (segment,) = grow(StaticGrowth(tree, (1, 1, 3, 1, 1, 1, 1, 1)), tree)
    depths = [tree[node].depth for node in segment]
    assert [depths.count(level) for level in range(9)] == [1, 1, 1, 3, 3, 3, 3, 3, 3]


@given(st.integers(0, 8), st.floats(-4, 0))
def test_a_path_is_as_long_as_it_may_be_or_as_likely_as_it_must(length: int, least: float) -> None:
    tree = planted()
    (path,) = grow(PathGrowth(tree, tree.root, length, lambda tree, path: [path], least), tree)
    assert len(path) <= length
    assert all(tree[node].score >= least for node in path)
    if len(path) < length:
        expansion = tree[path[-1] if path else tree.root].expansion
        assert expansion is not None
        assert (tree[path[-1]].score if path else 0.0) + expansion.values[0] < least


def test_a_path_continues_from_another_models_tip() -> None:
    tree = planted()
    growth = PathGrowth(tree, tree.root, 4, lambda tree, path: [path])
    grow(growth, tree)
    tip = tree.add(tree.root, 50, -0.1)
    growth.adopt(tree, tip)
    assert growth.tip == tip
    growth.adopt(tree, tree.root)
    assert growth.tip == tip, "an ancestor is already in the tree"
    tree.advance(tip)
    growth.rebase(tree)
    assert growth.tip == tip
