"""The order of messages that travel on two ways."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import GRAPH, SCHEDULER, Address
from flowspec.core.protocol.in_order import MOST_CHANNELS, MOST_HELD, InOrder
from flowspec.core.protocol.messages import Close, Envelope, Revoke
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1

RUN = RunKey("1-0", 1)


def message(seq: int, sender: Address = D0, run: RunKey = RUN) -> Envelope:
    return Envelope(sender, seq, Close(run))


@given(st.permutations(range(1, 9)), st.permutations(range(1, 9)), st.randoms())
def test_each_senders_messages_come_out_once_and_in_order(
    first: list[int], second: list[int], random: object
) -> None:
    order = InOrder()
    arriving = [message(seq) for seq in first] + [message(seq, S1) for seq in second]
    arriving += [message(seq) for seq in first[:3]]  # a writer that lost the answer sends again
    random.shuffle(arriving)  # type: ignore[attr-defined]
    found = [known for envelope in arriving for known in order.arrive(envelope, 0.0)]
    for sender in (D0, S1):
        assert [one.seq for one in found if one.sender == sender] == list(range(1, 9))
    assert order.deadline is None
    assert order.overdue(1e9) == []


@given(st.permutations(range(2, 7)))
def test_a_message_comes_out_as_soon_as_those_before_it_are_there(seqs: list[int]) -> None:
    order = InOrder()
    assert all(order.arrive(message(seq), 0.0) == [] for seq in seqs)
    assert [one.seq for one in order.arrive(message(1), 0.0)] == [1, 2, 3, 4, 5, 6]


def test_what_the_scheduler_and_the_graph_send_never_waits() -> None:
    order = InOrder()
    for envelope in (Envelope(SCHEDULER, 0, Revoke(RUN)), message(7, GRAPH), message(7, SCHEDULER)):
        assert order.arrive(envelope, 0.0) == [envelope]
    assert order.deadline is None


def test_a_missing_message_is_waited_for_and_then_left_to_the_receiver() -> None:
    order = InOrder(patience=2.0)
    order.arrive(message(1), 0.0)
    assert order.arrive(message(4), 10.0) == []
    assert order.arrive(message(3), 11.0) == []
    assert order.deadline == 12.0
    assert order.overdue(11.9) == []
    assert [one.seq for one in order.overdue(12.0)] == [3, 4]
    assert order.deadline is None
    assert order.arrive(message(2), 13.0) == [], "it comes too late"
    assert [one.seq for one in order.arrive(message(5), 13.0)] == [5]


def test_those_behind_a_late_message_have_their_own_patience() -> None:
    order = InOrder(patience=2.0)
    order.arrive(message(1), 0.0)
    order.arrive(message(3), 0.0)
    order.arrive(message(5), 1.9)
    assert [one.seq for one in order.arrive(message(2), 1.95)] == [2, 3]
    assert order.deadline == 3.95
    assert order.overdue(3.9) == []


def test_runs_and_senders_do_not_wait_for_each_other() -> None:
    order = InOrder()
    other = RunKey("1-0", 2)
    assert order.arrive(message(2), 0.0) == []
    assert len(order.arrive(message(1, S1), 0.0)) == 1
    assert len(order.arrive(message(1, run=other), 0.0)) == 1


def test_an_ended_run_holds_nothing() -> None:
    order = InOrder()
    order.arrive(message(2), 0.0)
    order.forget(RUN)
    assert order.deadline is None
    assert order.overdue(1e9) == []


def test_what_is_held_has_a_bound() -> None:
    order = InOrder()
    stray = RunKey("stray", 1)
    assert order.arrive(message(2, run=stray), 0.0) == []
    held = [order.arrive(message(seq), 1.0) for seq in range(2, MOST_HELD + 2)]
    assert [one.message.run for found in held for one in found] == [stray], "the oldest goes first"
    assert order.deadline == 1.0 + 5.0


def test_the_pairs_remembered_have_a_bound() -> None:
    order = InOrder()
    for number in range(MOST_CHANNELS + 1):
        run = RunKey(f"{number}-0", 1)
        assert order.arrive(message(1, run=run), 0.0) == [message(1, run=run)]
    assert len(order.arrive(message(1, run=RunKey("0-0", 1)), 0.0)) == 1, "it is forgotten"
    assert order.arrive(message(1, run=run), 0.0) == [], "it is remembered"
