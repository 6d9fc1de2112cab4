"""Whichever drafter's turn it is, what it holds is the context and, of every row it computes, the
whole path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.drafting.drafter_cache import CATCH_UP_ROWS, DrafterCache
from flowspec.core.drafting.drafting import Drafting
from flowspec.core.protocol.machine import DraftDone, Part
from flowspec.core.tree.tree import Node, Tree
from tests.core.drafting.test_drafting import growth

PROMPT = (7, 8, 9)
LAST = len(PROMPT) - 1


@dataclass
class Rows:
    """What a drafter's cache holds, by slot."""

    ids: list[int] = field(default_factory=list)

    def compute(self, part: Part) -> None:
        """As a cache does: move, drop, append; a row sees the context and its parents' chain."""
        if part.moves is not None:
            moved = [self.ids[source] for source in part.moves.sources]
            self.ids[part.moves.start : part.moves.start + len(moved)] = moved
        assert len(self.ids) >= part.held
        del self.ids[part.held :]
        self.ids += part.ids


@given(st.data(), st.lists(st.booleans(), min_size=2, max_size=3))
def test_every_drafter_catches_up_when_its_turn_comes(
    data: st.DataObject, refreshed: list[bool]
) -> None:
    tree = Tree(len(PROMPT))
    tree.plant(50, len(PROMPT), LAST)
    holdings = [DrafterCache(PROMPT, refreshed=each) for each in refreshed]
    rows = [Rows() for _ in refreshed]
    committed = list(range(len(PROMPT)))
    answered = set[int]()
    first = Tree(LAST)
    first.plant(PROMPT[-1], LAST, LAST - 1)
    for holding in holdings:
        holding.commit([first[LAST]], tree.root)
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.sampled_from(range(len(holdings))))
        known = list(tree.nodes)
        # A growth asks for no node that some drafter has answered for.
        wanted = [
            node
            for node in data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
            if node not in answered
        ]
        found = holdings[at].next_part(
            "j", 1, tree, holdings[at].closed(tree, wanted) if wanted else ()
        )
        if found is not None:
            part, parents, nodes = found
            rows[at].compute(part)
            answered.update(nodes)
            assert len(parents) == len(part.ids)
            assert set(wanted) <= set(nodes)
            assert rows[at].ids[: part.context] == committed[: part.context]
            lagging = len(part.ids) - len(part.answers)
            assert rows[at].ids[part.context : part.context + lagging] == committed[part.context :]
            for node in nodes:
                assert tree[node].position == part.positions[part.ids.index(node)]
                while node != tree.root:
                    node = tree[node].parent
                    assert node in rows[at].ids, "what a row sees is there"
        for node in data.draw(st.lists(st.sampled_from(known), max_size=2, unique=True)):
            tree.add(node, data.draw(st.integers(0, 3)), -0.5)
        below = [node for node in tree.nodes if node != tree.root]
        if below and data.draw(st.booleans()):
            tip = data.draw(st.sampled_from(below))
            path = [tip]
            while path[0] != tree.root:
                path.insert(0, tree[path[0]].parent)
            accepted = [tree[node] for node in path[:-1]]
            tree.select(path[1:])
            tree.advance(tip)
            committed += [node.id for node in accepted]
            for holding in holdings:
                holding.commit(accepted, tip)


def accepted(*ids: int) -> list[Node]:
    return [Node(node, node - 1, 5, node, 0.0, 0.0, 0) for node in ids]


def test_who_has_hidden_rows_to_keep_is_overdue_when_it_owes_a_pass() -> None:
    for refreshed in (False, True):
        holding = DrafterCache(PROMPT, refreshed=refreshed)
        tree = Tree(LAST)
        for last in range(LAST, CATCH_UP_ROWS - 1):
            assert not holding.overdue
            holding.commit(accepted(last), last + 1)
        holding.commit(accepted(CATCH_UP_ROWS - 1), CATCH_UP_ROWS)
        assert holding.overdue == refreshed
        assert holding.next_part("j", 1, tree, ()) is not None
        assert not (holding.overdue or holding.lags)


def test_an_overdue_drafter_goes_first_and_the_one_that_drafts_loses_nothing_but_the_time() -> None:
    drafting = Drafting("j", 1, PROMPT, 2, refreshed=(False, True, False))
    tree = Tree(len(PROMPT))
    passes = list[tuple[int, int]]()
    root = tree.plant(50, len(PROMPT), LAST)
    drafting.commit(accepted(LAST), root, tree)
    for _ in range(2 * CATCH_UP_ROWS):
        drafting.begin(growth(tree, 0), idle=False)
        assert drafting.wants(tree)
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
