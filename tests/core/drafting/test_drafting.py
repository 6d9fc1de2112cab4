"""A session's drafting: lag, growth, and their state after a verdict."""

from __future__ import annotations

import pytest

from flowspec.core.drafting.beam_growth import BeamGrowth, BeamSearch
from flowspec.core.drafting.drafter_cache import CATCH_UP_ROWS
from flowspec.core.drafting.drafting import RESTING_ROWS, Drafting, DraftingOptions
from flowspec.core.protocol.work import Draft, DraftDone, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.tree.tree import Expansion, Node, Tree
from flowspec.errors import ProtocolError
from flowspec.model.rows.placement import ContiguousRows, Placement

RUN = RunKey("j", 1)
WIDTH = 2


def planted(length: int) -> Tree:
    tree = Tree(length)
    tree.plant(50, length, length - 1)
    return tree


def growth(tree: Tree, loops: int) -> BeamGrowth:
    base = BeamSearch(tree, WIDTH, loops)
    return BeamGrowth(
        base, lambda tree: [[node for node in base.best(tree, 99) if not tree[node].selected]]
    )


def nodes(*entries: tuple[int, int]) -> list[Node]:
    """Accepted nodes from (id, token); the drafter reads no other field."""
    return [Node(node, node - 1, token, node, 0.0, 0.0, 0) for node, token in entries]


def answer(work: Draft) -> DraftDone:
    """Tokens 1 and 2 below every node, 1 more likely."""
    rows = len(work.part.answers)
    return DraftDone(((1, 2),) * rows, ((-0.1, -1.0),) * rows)


def placements(*passes: Draft) -> list[Placement]:
    """Places of the rows of ``passes`` in a drafter's memory, per pass."""
    rows = ContiguousRows()
    return [rows.place(one.part) for one in passes]


def work(drafting: Drafting, tree: Tree) -> Draft:
    found = drafting.next_work(tree)
    assert found is not None
    return found


def test_a_long_prompt_is_fed_in_parts_before_anything_is_asked() -> None:
    length = CATCH_UP_ROWS + 10
    drafting = Drafting(RUN, range(length), DraftingOptions(WIDTH))
    tree = planted(length)
    drafting.commit(nodes((length - 1, 0)), tree.root, tree)
    drafting.begin(growth(tree, 1), idle=False)
    assert drafting.needs_drafter(tree)
    first = work(drafting, tree)
    assert (len(first.part.ids), first.part.answers) == (CATCH_UP_ROWS, ())
    drafting.done(answer(first), tree)
    second = work(drafting, tree)
    assert second.part.ids == (*range(CATCH_UP_ROWS, length), tree.root)
    assert second.part.answers == (10,)
    assert second.part.parents == (*range(CATCH_UP_ROWS - 1, length - 1), length - 1)
    assert (first.part.context, second.part.context) == (CATCH_UP_ROWS, 10)
    assert placements(first, second)[-1] == Placement(
        CATCH_UP_ROWS, CATCH_UP_ROWS, None, tuple(range(-1, 10))
    )
    assert second.part.positions[-1] == length


def test_accepted_leaves_it_never_ran_lead_the_next_pass() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    drafting.begin(growth(tree, 0), idle=False)
    assert drafting.needs_drafter(tree)
    first = work(drafting, tree)
    drafting.done(answer(first), tree)
    assert not drafting.needs_drafter(tree)
    (segment,) = drafting.collect(tree)
    leaf = segment[0]
    path = [(tree.root, 50), (leaf, tree[leaf].token)]
    root = tree.plant(60, 4, leaf)
    drafting.commit(nodes(*path), root, tree)
    drafting.begin(growth(tree, 0), idle=False)
    drafting.needs_drafter(tree)
    second = work(drafting, tree)
    part = second.part
    assert part.ids == (leaf, root)
    assert part.tokens == (1, 60)
    assert (part.context, part.answers) == (1, (1,))
    assert placements(first, second)[-1] == Placement(3, 3, None, (-1, 0))


def test_a_growth_overtaken_by_a_verdict_gives_what_it_has_below_the_new_root() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    drafting.begin(growth(tree, 3), idle=False)
    for _ in range(2):  # of four layers
        assert drafting.needs_drafter(tree)
        drafting.done(answer(work(drafting, tree)), tree)
    assert drafting.needs_drafter(tree)
    assert drafting.continuing
    child = tree.child(tree.root, 1)
    assert child is not None
    path = [(tree.root, 50)]
    tree.mark_waiting([child])
    tree.advance(child)
    drafting.commit(nodes(*path), child, tree)
    (segment,) = drafting.collect_overtaken(tree)
    assert segment
    assert all(tree[node].parent == child for node in segment)
    assert not drafting.growing
    assert drafting.collect_overtaken(tree) == []


def test_proposals_for_pruned_nodes_are_forgotten() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH))
    tree = planted(2)
    old = tree.root
    drafting.commit(nodes((1, 8)), old, tree)
    drafting.begin(growth(tree, 1), idle=False)
    drafting.needs_drafter(tree)
    running = work(drafting, tree)
    assert not drafting.has_work, "one pass at a time"
    root = tree.plant(9, 3, old)
    drafting.commit(nodes((old, 50)), root, tree)
    drafting.begin(growth(tree, 1), idle=False)
    drafting.needs_drafter(tree)
    drafting.done(answer(running), tree)
    assert tree[root].expansion is None
    assert work(drafting, tree).part.ids == (root,), (
        "the old root's row was computed, and is context now"
    )


def test_a_token_that_is_proposed_twice_is_an_error() -> None:
    tree = planted(4)
    drafting = Drafting(RUN, range(4), DraftingOptions(WIDTH))
    drafting.begin(growth(tree, 1), idle=False)
    assert drafting.needs_drafter(tree)
    asked = work(drafting, tree)
    rows = len(asked.part.answers)
    with pytest.raises(ProtocolError, match="a token twice"):
        drafting.done(DraftDone(((1, 1),) * rows, ((-0.1, -1.0),) * rows), tree)


def test_without_a_drafter_there_is_never_work() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(0))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), 2, tree)
    drafting.commit(nodes((2, 9)), 3, tree)
    assert not drafting.has_work


def test_what_a_wanted_node_hangs_from_is_fed_before_it() -> None:
    """This drafter never ran a node that another model added."""
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    tip = tree.add(tree.add(tree.root, 5, -0.1), 6, -0.1)

    class Tip:
        def proceed(self, tree: Tree) -> tuple[int, ...]:
            return (tip,) if tree[tip].expansion is None else ()

        def segments(self, tree: Tree) -> list[list[int]]:
            return []

        def rebase(self, tree: Tree) -> None:
            raise AssertionError("nothing moved")

    drafting.begin(Tip(), idle=True)
    assert drafting.needs_drafter(tree)
    asked = work(drafting, tree)
    assert asked.part.ids == (0, 1, tree.root, tip - 1, tip)
    assert asked.part.parents == (-1, 0, 1, tree.root, tip - 1)
    assert placements(asked)[-1].parents == (-1, 0, 1, 2, 3)


def test_a_refreshed_drafter_runs_accepted_rows_again_and_forgets_the_tree() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH, refreshed=(True,)))
    tree = planted(2)
    assert not drafting.has_work, "the prompt's hidden rows come with the first verdict"
    drafting.commit(nodes((1, 8)), tree.root, tree)
    drafting.begin(growth(tree, 0), idle=False)
    assert drafting.needs_drafter(tree)
    first = work(drafting, tree)
    assert first.part.ids == (0, 1, tree.root)
    drafting.done(answer(first), tree)
    old = tree.root
    child = tree.add(tree.root, 1, -0.1)
    tree.mark_waiting([child])
    tree.expand(child, answer_of(2))
    tree.advance(child)
    drafting.commit(nodes((old, 50)), child, tree)
    assert tree[child].expansion is None, "it came from hidden states that are now known better"
    drafting.begin(growth(tree, 0), idle=False)
    assert drafting.needs_drafter(tree)
    again = work(drafting, tree)
    assert again.part.ids == (old, child)
    assert again.part.context == 1
    assert again.part.pruned == Pruned((), ()), "all it computed for the tree is gone"
    assert placements(first, again)[-1] == Placement(2, 2, None, (-1, 0))


def test_a_pass_overtaken_by_a_refresh_counts_for_nothing() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH, refreshed=(True,)))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    child = tree.add(tree.root, 1, -0.1)
    tree.mark_waiting([child])
    old = tree.root
    tree.expand(old, answer_of(2))
    drafting.begin(growth(tree, 1), idle=False)
    assert drafting.needs_drafter(tree)
    running = work(drafting, tree)
    assert child in running.part.ids
    tree.advance(child)
    drafting.commit(nodes((old, 50)), child, tree)
    drafting.done(answer(running), tree)
    assert tree[child].expansion is None


def answer_of(width: int) -> Expansion:
    return Expansion(tuple(range(1, width + 1)), tuple(-0.1 * at for at in range(1, width + 1)))


def test_a_pass_takes_what_most_passes_of_the_drafter_at_work_took() -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH, refreshed=(False, False)))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    for drafter, took in ((0, 9.0), (1, 2.0), (0, 0.25), (0, 0.5)):
        drafting.begin(growth(tree, 0), idle=False, drafter=drafter)
        tree[tree.root].expansion = None
        assert drafting.needs_drafter(tree)
        asked = work(drafting, tree)
        assert asked.drafter == drafter
        drafting.done(answer(asked), tree, took)
        old = tree.root
        child = tree.add(tree.root, 1, -0.1)
        tree.mark_waiting([child])
        tree.advance(child)
        drafting.commit(nodes((old, 50)), child, tree)
    assert (drafting.pass_seconds, drafting.least_pass_seconds) == (0.5, 0.25)
    drafting.begin(None, idle=False, drafter=1)
    assert (drafting.pass_seconds, drafting.least_pass_seconds) == (2.0, 2.0)


@pytest.mark.parametrize("refreshed", [False, True])
def test_beside_plain_decoding_a_pass_behind_the_prompt_waits_for_rows(refreshed: bool) -> None:
    drafting = Drafting(RUN, (7, 8), DraftingOptions(WIDTH, refreshed=(refreshed,)))
    tree = planted(2)
    drafting.commit(nodes((1, 8)), tree.root, tree)
    passes = []
    for position in range(3, 3 + RESTING_ROWS + 4):
        drafting.begin(None, idle=False, rests=True)
        if drafting.has_work:
            passes.append(work(drafting, tree))
            drafting.done(DraftDone((), ()), tree)
        old = tree.root
        root = tree.plant(60, position, old)
        drafting.commit(nodes((old, 60)), root, tree)
    assert [len(one.part.ids) for one in passes] == [2, RESTING_ROWS]
    assert drafting.computed == (2 + RESTING_ROWS,)
    assert not drafting.has_work
    drafting.begin(None, idle=False)
    assert drafting.has_work, "and what is left is computed as soon as something may be drafted"
