"""The in-flight window: sent segments, and answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Answer
from flowspec.core.run.key import RunKey
from flowspec.core.session.in_flight import InFlightSegment, InFlightWindow
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.tree import Status, Tree
from flowspec.errors import ProtocolError


def answer(segment: int, *ids: int) -> Answer:
    return Answer(RunKey("j", 1), segment, ids, tuple(100 + node for node in ids))


class Rig:
    """A window and its tree, whose root 0 has the waiting children 1 to ``children``."""

    def __init__(self, children: int) -> None:
        self.window = InFlightWindow()
        self.tree = Tree(0)
        self.tree.plant(0, 0, -1)
        for token in range(1, children + 1):
            self.tree.mark_waiting([self.tree.add(0, token, -1.0)])

    def launch(self, number: int, nodes: list[int], now: float = 0.0) -> None:
        self.tree.mark_sent(nodes)
        self.window.launch(number, nodes, now)

    def land(self, answer: Answer, now: float) -> InFlightSegment | None:
        """Take an answer as a session does."""
        segment = self.window.land(answer, now)
        for at, (node, token) in enumerate(zip(answer.ids, answer.tokens, strict=True)):
            self.tree.record_choice(node, token, answer.top[at] if answer.top else ())
        return segment

    def prune(self, root: int, *, keep_emptied: bool = False) -> None:
        self.tree.advance(root)
        self.window.prune(self.tree, keep_emptied=keep_emptied)


def test_answers_are_kept_for_what_was_sent_and_lives() -> None:
    rig = Rig(3)
    grandchild = rig.tree.add(2, 9, -1.0)
    rig.tree.mark_waiting([grandchild])
    rig.launch(0, [1, 2, grandchild])
    assert rig.land(answer(0, 1, 2, grandchild, 3, 99), 1.0) is not None
    choices = {node.id: node.choice for node in rig.tree}
    assert choices == {0: None, 1: 101, 2: 102, 3: None, grandchild: 100 + grandchild}
    rig.prune(2)
    assert {node.id: node.choice for node in rig.tree} == {2: 102, grandchild: 100 + grandchild}
    assert rig.tree.sent == {2, grandchild}
    assert rig.land(answer(7, 2), 1.0) is None, "the prompt's, or a void one's"


def test_what_was_asked_for_beside_an_answer_is_kept_with_its_node() -> None:
    rig = Rig(2)
    rig.launch(0, [1, 2])
    top = (((5, -0.1), (6, -2.0)), ((7, -0.3),))
    rig.land(Answer(RunKey("j", 1), 0, (1, 2), (5, 7), top), 1.0)
    assert (rig.tree[1].top, rig.tree[2].top) == top


def test_a_round_trip_is_of_what_was_sent_and_says_whether_it_met_another() -> None:
    rig = Rig(4)
    rig.launch(0, [1, 2, 3], 1.0)
    below = rig.tree.add(1, 9, -1.0)
    rig.tree.mark_waiting([below])
    rig.launch(1, [4, below], 2.0)
    rig.prune(1)
    first = rig.land(answer(0, 1), 5.0)
    second = rig.land(answer(1, below), 7.0)
    assert first is not None
    assert second is not None
    assert first.round_trip(5.0) == RoundTrip(3, 4.0, True)
    assert second.round_trip(7.0) == RoundTrip(2, 5.0, False)


def test_a_segment_a_prune_has_emptied_frees_its_slot_unless_it_counts() -> None:
    rig = Rig(3)
    rig.launch(0, [1, 2])
    rig.launch(1, [3])
    rig.prune(1, keep_emptied=True)
    assert (len(rig.window), rig.window.loaded) == (2, [0])
    rig.window.prune(rig.tree, keep_emptied=False)
    assert (len(rig.window), rig.window.loaded) == (1, [0])
    rig.window.clear()
    assert (len(rig.window), rig.window.loaded) == (0, [])


def test_a_live_row_that_does_not_come_back_is_an_error() -> None:
    rig = Rig(2)
    rig.launch(0, [1, 2])
    with pytest.raises(ProtocolError, match="came back without rows that are still live"):
        rig.land(answer(0, 1), 1.0)


def test_segments_wait_in_order_and_lose_what_a_prune_takes() -> None:
    rig = Rig(3)
    assert (rig.window.first_waiting, rig.window.waiting) == (None, 0)
    below = [rig.tree.add(1, token, -1.0) for token in (7, 8)]
    for segment in ([2], [1, 3, below[0]], [below[1]]):
        rig.tree.mark_waiting(segment)
        rig.window.enqueue(segment)
    assert (rig.window.first_waiting, rig.window.waiting) == ([2], 3)
    rig.prune(1)
    assert (rig.window.first_waiting, rig.window.waiting) == ([1, below[0]], 2)
    assert rig.window.dequeue() == [1, below[0]]
    assert rig.window.dequeue() == [below[1]]
    assert rig.window.waiting == 0


def test_a_fresh_round_has_nothing_waiting_and_nothing_in_flight() -> None:
    rig = Rig(2)
    rig.launch(0, [1])
    rig.window.enqueue([2])
    rig.window.clear()
    assert (len(rig.window), rig.window.loaded, rig.window.waiting) == (0, [], 0)
    rig.tree.plant(0, 1, 0)
    assert rig.land(answer(0, 1), 1.0) is None


def test_answers_tell_how_many_segments_hide_the_round_trip() -> None:
    rig = Rig(2)
    assert rig.window.bandwidth_delay.segments == 0
    rig.launch(0, [1], 1.0)
    rig.land(Answer(RunKey("j", 1), 0, (1,), (5,), seconds=2.0), 5.0)
    assert rig.window.bandwidth_delay.segments == 3, "4 s over passes of 2 s, and one more"


def test_a_gap_behind_segments_that_a_prune_has_emptied_says_nothing() -> None:
    """The pipeline was idle, so the time to the next answer is not the rate of answers."""
    rig = Rig(4)
    rig.launch(0, [1], 0.0)
    rig.launch(1, [2], 0.0)
    rig.land(Answer(RunKey("j", 1), 0, (1,), (5,), seconds=1.0), 4.0)
    below = rig.tree.add(1, 9, -1.0)
    rig.tree.mark_waiting([below])
    rig.prune(1)
    assert rig.window.loaded == []
    rig.launch(2, [below], 100.0)
    rig.land(Answer(RunKey("j", 1), 2, (below,), (5,), seconds=1.0), 104.0)
    assert rig.window.bandwidth_delay.segments == 5, "4 s over passes of 1 s, and one more"


@given(st.data())
def test_every_sent_node_is_in_one_segment_or_answered(data: st.DataObject) -> None:
    """Random launches, answers and prunes: the window and the tree agree."""
    rig = Rig(0)
    rig.tree.mark_sent([0])
    window = rig.window
    tree = rig.tree
    number = 0
    sent: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        step = data.draw(st.sampled_from(["launch", "answer", "prune"]))
        if step == "launch":
            parents = data.draw(
                st.lists(st.sampled_from(sorted(tree.sent)), min_size=1, max_size=3)
            )
            nodes = [tree.add(parent, tree.next_id, -1.0) for parent in parents]
            tree.mark_waiting(nodes)
            rig.launch(number, nodes)
            sent[number] = nodes
            number += 1
        elif step == "answer" and window.loaded:
            segment = data.draw(st.sampled_from(window.loaded))
            live = [node for node in sent[segment] if node in tree]
            assert rig.land(answer(segment, *live), 1.0) is not None
        elif step == "prune":
            rig.prune(data.draw(st.sampled_from(sorted(tree.sent))))
        on_the_way = [node for at in window.loaded for node in sent[at] if node in tree]
        unanswered = [node.id for node in tree if node.status is Status.SENT and node.id]
        assert sorted(on_the_way) == sorted(unanswered)
        assert len(window) == len(window.loaded)
        tree.check()
