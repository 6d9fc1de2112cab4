"""Which nodes get a block, on random trees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.block_stems import BLOCKS, block_stems
from flowspec.core.tree.tree import Tree


@st.composite
def grown(draw: st.DrawFn) -> tuple[Tree, list[int]]:
    tree = Tree(5)
    nodes = [tree.plant(1, 5, 4)]
    for token in range(draw(st.integers(0, 40))):
        parent = nodes[draw(st.integers(0, len(nodes) - 1))]
        nodes.append(tree.add(parent, token, -draw(st.floats(0, 3))))
    wanted = draw(st.lists(st.sampled_from(nodes), unique=True, min_size=1))
    return tree, sorted(wanted)


@given(grown(), st.integers(1, 6))
def test_the_best_have_their_own_block_and_the_rest_one_within_reach(
    case: tuple[Tree, list[int]], levels: int
) -> None:
    tree, wanted = case
    stems = block_stems(tree, wanted, levels)
    assert stems == sorted(set(stems))
    if len(wanted) <= BLOCKS:
        assert stems == wanted
    ranked = sorted(wanted, key=lambda node: -tree[node].score)
    least = tree[ranked[:BLOCKS][-1]].score
    assert all(node in stems for node in wanted if tree[node].score > least)
    for node in wanted:
        above = set(tree.path(node)[-levels:]) & set(stems)
        assert above, "a block answers for it"


def test_a_layer_of_siblings_shares_one_block() -> None:
    tree = Tree(5)
    root = tree.plant(1, 5, 4)
    top = tree.add(root, 9, -0.1)
    layer = [tree.add(top, token, -0.1 * token) for token in range(40)]
    assert block_stems(tree, layer, 4) == [top, *layer[:BLOCKS]]
    assert block_stems(tree, layer, 1) == layer
