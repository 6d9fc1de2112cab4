"""Middle models that lag receive missed tokens in a valid order, and catch up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.messages import Answer, Prune, Segment
from flowspec.core.run.key import RunKey
from flowspec.core.session.model_chain import ModelChain
from flowspec.core.session.outbox import Outbox
from flowspec.core.session.strategy import Strategy, View
from flowspec.core.tree.live_rows import LiveRows
from flowspec.core.tree.tree import Tree
from tests.addresses import D0, M1, M2, S1

RUN = RunKey("j", 1)
PROMPT = (7, 8, 9)


class Eager(Strategy):
    """Every model verifies its own text to the end whenever it is idle."""

    def next_for_middle(self, view: View, model: int, tip: int) -> int | None:
        return tip


class Rig:
    """One middle model with at most ``rows`` tree rows; the target chooses 100 + position.

    ``agrees``: by position, whether the middle model chooses the same.
    """

    def __init__(self, rows: int, agrees: list[bool]) -> None:
        self.rows = rows
        self.agrees = agrees
        self.outbox = Outbox(RUN, 1)
        self.chain = ModelChain(RUN, len(PROMPT), 1, rows, self.outbox)
        self.tree = Tree(len(PROMPT) - 1)
        self.tree.plant(PROMPT[-1], len(PROMPT) - 1, len(PROMPT) - 2)
        self.decoding = False
        self.held = LiveRows(len(PROMPT))
        self.held.begin_pass((0, 1, 2), (-1, 0, 1), 2)
        self.offset = len(PROMPT) - 1
        self.waiting: Answer | None = self.choose(((2, 2),))

    def choose(self, rows: tuple[tuple[int, int], ...]) -> Answer:
        """The middle model's answer for ``rows`` of (id, position)."""
        positions = [position for _, position in rows]
        tokens = (100 + p + 1 if self.agrees[p % len(self.agrees)] else 50 for p in positions)
        return Answer(RUN, 0, tuple(node for node, _ in rows), tuple(tokens))

    @property
    def view(self) -> View:
        return View(self.tree, 0, 0, decoding=self.decoding)

    def commit(self, count: int) -> None:
        """The target commits ``count`` tokens, along the tree while it has them."""
        for _ in range(count):
            root = self.tree[self.tree.root]
            token = 100 + root.position + 1
            child = self.tree.child(root.id, token)
            if child is None:
                self.tree.plant(token, root.position + 1, root.id)
            else:
                self.tree.advance(child)
            self.decoding = True
            self.chain.commit([root], self.tree)
        self.feed()

    def land(self) -> None:
        """Receive the middle model's answer, if one is in flight."""
        if self.waiting is not None:
            answer = self.waiting
            self.waiting = None
            self.chain.land(1, answer, self.view)
            self.feed()

    def feed(self) -> None:
        self.chain.feed(Eager(), self.view)
        for output in self.outbox.take():
            assert isinstance(output, Send)
            self.receive(output.envelope.message)

    def receive(self, message: object) -> None:
        """Take a segment as a stage does: accepted rows are held, rows to compute fit."""
        if isinstance(message, Prune):
            assert message.offset == self.offset
            assert set(message.accepted) <= self.held.tree
            self.held.prune(message.accepted, message.root)
            self.offset += len(message.accepted)
            assert self.held.tree == set(message.retained)
        else:
            assert isinstance(message, Segment)
            assert message.ids
            for node, parent in zip(message.ids, message.parents, strict=True):
                assert self.held.live((node,), (parent,)), "every row's parent is present"
                self.held.begin_pass((node,), (parent,))
            assert len(self.held.tree) <= self.rows
            assert self.waiting is None, "one at a time"
            self.waiting = self.choose(tuple(zip(message.ids, message.positions, strict=True)))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("behind", [1, 3, 4, 5, 30])
def test_a_model_far_behind_catches_up_in_as_many_rows_as_it_has_room_for(
    rows: int, behind: int
) -> None:
    rig = Rig(rows, [False])
    rig.commit(behind)
    assert rig.offset == len(PROMPT) - 1, "it is still busy with the prompt"
    for _ in range(-(-behind // rows) + 1):
        rig.land()
    assert rig.tree.root in rig.held
    assert rig.offset == len(PROMPT) - 1 + behind


@given(
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.lists(st.integers(0, 4), max_size=40),
)
def test_whatever_the_pace_a_model_can_follow_and_catches_up(
    rows: int, agrees: list[bool], moves: list[int]
) -> None:
    """0: the model answers; n: the target commits n tokens. The rig asserts."""
    rig = Rig(rows, agrees)
    committed = 0
    for move in moves:
        rig.commit(move) if move else rig.land()
        committed += move
    rig.commit(1)
    for _ in range(committed + 3):
        rig.land()
    assert rig.tree.root in rig.held
    assert rig.offset == len(PROMPT) + committed


def test_a_chain_knows_its_own_models() -> None:
    chain = ModelChain(RUN, len(PROMPT), 1, 4, Outbox(RUN, 1))
    assert chain.addresses == (M1,)
    assert chain.includes(M1)
    assert not any(map(chain.includes, (M2, S1, D0)))
