"""A session's dealings with the drafter: lag, growth, and what a verdict leaves of them."""

from __future__ import annotations

from flowspec.core.drafting import CATCH_UP_ROWS, Drafting
from flowspec.core.growth import BeamGrowth
from flowspec.core.machine import Draft, DraftDone
from flowspec.core.tree import Tree
from flowspec.strategies.base import Grown

WIDTH = 2


def planted(length: int) -> Tree:
    tree = Tree(length)
    tree.plant(50, length, length - 1)
    return tree


def growth(tree: Tree, loops: int) -> Grown:
    base = BeamGrowth(tree, WIDTH, loops)
    return Grown(base, lambda tree: [[node for node in base.best(tree, 99) if not tree[node].selected]])


def answer(work: Draft) -> DraftDone:
    """Tokens 1 and 2 below every node, the first one likelier."""
    rows = len(work.part.answers)
    return DraftDone(((1, 2),) * rows, ((-0.1, -1.0),) * rows)


def work(drafting: Drafting, tree: Tree) -> Draft:
    found = drafting.next_work(tree)
    assert found is not None
    return found


def test_a_long_prompt_is_fed_in_parts_before_anything_is_asked() -> None:
    length = CATCH_UP_ROWS + 10
    drafting = Drafting("j", 1, tuple(range(length)), WIDTH)
    tree = planted(length)
    drafting.commit([(length - 1, 0)], tree.root)
    drafting.begin(growth(tree, 1), idle=False)
    assert drafting.advance(tree) is None
    first = work(drafting, tree)
    assert (len(first.part.ids), first.part.answers) == (CATCH_UP_ROWS, ())
    drafting.done(answer(first), tree)
    second = work(drafting, tree)
    assert second.part.ids == (*range(CATCH_UP_ROWS, length), tree.root)
    assert second.part.answers == (10,)
    assert (second.part.context, second.part.held) == (CATCH_UP_ROWS, CATCH_UP_ROWS)
    assert second.part.positions[-1] == length


def test_accepted_leaves_it_never_ran_lead_the_next_pass() -> None:
    drafting = Drafting("j", 1, (7, 8), WIDTH)
    tree = planted(2)
    drafting.commit([(1, 8)], tree.root)
    drafting.begin(growth(tree, 0), idle=False)
    assert drafting.advance(tree) is None
    drafting.done(answer(work(drafting, tree)), tree)
    (segment,) = drafting.advance(tree) or []
    leaf = segment[0]
    path = [(tree.root, 50), (leaf, tree[leaf].token)]
    root = tree.plant(60, 4, leaf)
    drafting.commit(path, root)
    drafting.begin(growth(tree, 0), idle=False)
    drafting.advance(tree)
    part = work(drafting, tree).part
    assert part.ids == (leaf, root)
    assert part.tokens == (1, 60)
    assert (part.context, part.held, part.answers) == (3, 3, (1,))


def test_a_growth_overtaken_by_a_verdict_gives_what_it_has_below_the_new_root() -> None:
    drafting = Drafting("j", 1, (7, 8), WIDTH)
    tree = planted(2)
    drafting.commit([(1, 8)], tree.root)
    drafting.begin(growth(tree, 3), idle=False)
    for _ in range(2):  # of four layers
        assert drafting.advance(tree) is None
        drafting.done(answer(work(drafting, tree)), tree)
    assert drafting.advance(tree) is None
    assert drafting.continuing
    child = tree.child(tree.root, 1)
    assert child is not None
    path = [(tree.root, 50)]
    tree.select([child])
    tree.advance(child)
    drafting.commit(path, child)
    (segment,) = drafting.harvest(tree)
    assert segment
    assert all(tree[node].parent == child for node in segment)
    assert not drafting.growing
    assert drafting.harvest(tree) == []


def test_proposals_for_pruned_nodes_are_forgotten() -> None:
    drafting = Drafting("j", 1, (7, 8), WIDTH)
    tree = planted(2)
    old = tree.root
    drafting.commit([(1, 8)], old)
    drafting.begin(growth(tree, 1), idle=False)
    drafting.advance(tree)
    running = work(drafting, tree)
    assert not drafting.has_work, "one pass at a time"
    root = tree.plant(9, 3, old)
    drafting.commit([(old, 50)], root)
    drafting.begin(growth(tree, 1), idle=False)
    drafting.advance(tree)
    drafting.done(answer(running), tree)
    assert tree[root].expansion is None
    assert work(drafting, tree).part.ids == (root,), "the old root's row was computed, and is context now"


def test_without_a_drafter_there_is_never_work() -> None:
    drafting = Drafting("j", 1, (7, 8), 0)
    drafting.commit([(1, 8)], 2)
    drafting.commit([(2, 9)], 3)
    assert not drafting.has_work
