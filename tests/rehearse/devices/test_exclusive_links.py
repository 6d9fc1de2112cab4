"""Messages on exclusive links: which are transfers, and the order per sender and receiver."""

from __future__ import annotations

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.messages import Answer, Close, Envelope, Message, Prune, Segment, Synced
from flowspec.core.run.key import RunKey
from flowspec.rehearse.devices.exclusive_links import ExclusiveLinks, Letter, Transfer
from tests.addresses import D0, S1, S2

RUN = RunKey("j", 1)
ROWS = Segment(RUN, 1, 1, (1,), (0,), (1,))
PRUNE = Prune(RUN, 1, (), 1, ())
ANSWER = Answer(RUN, 1, (1,), (5,))


def letter(
    source: Address,
    to: Address,
    message: Message,
    seconds: float = 1.0,
    sender: Address | None = None,
) -> Letter:
    return Letter(source, to, Envelope(sender or source, 1, message), seconds)


def test_rows_and_answers_that_take_time_between_two_nodes_are_transfers() -> None:
    assert letter(D0, S1, ROWS).is_transfer
    assert letter(S1, D0, ANSWER).is_transfer
    assert not letter(D0, S1, ROWS, 0.0).is_transfer
    assert not letter(S1, S1, ROWS).is_transfer
    assert not letter(D0, S1, PRUNE).is_transfer
    assert not letter(D0, S1, Close(RUN)).is_transfer


def test_what_overtakes_a_waiting_transfer_is_held_until_that_has_arrived() -> None:
    """Messages are numbered per sender: an early one would look like a loss."""
    links = ExclusiveLinks((D0, S1, S2))
    busy = letter(S1, S2, ROWS)
    rows = letter(D0, S1, ROWS)
    prune = letter(D0, S1, PRUNE)
    assert links.send(busy, 0.0) == [busy]
    assert links.send(rows, 0.25) == []
    assert links.send(prune, 0.5) == [prune], "it is not a transfer and leaves at once"
    assert links.arrive(busy, 1.0) == ([busy], [rows])
    assert links.arrive(prune, 1.5) == ([], [])
    assert links.arrive(rows, 2.0) == ([rows, prune], [])
    assert links.log == [Transfer(S1, S2, 0.0, 1.0), Transfer(D0, S1, 1.0, 2.0)]


def test_other_senders_other_receivers_and_other_runs_are_not_held() -> None:
    links = ExclusiveLinks((D0, S1, S2))
    links.send(letter(S1, S2, ROWS), 0.0)
    assert links.send(letter(D0, S1, ROWS), 0.0) == []
    for other in (
        letter(S2, S1, PRUNE),
        letter(D0, S2, PRUNE),
        letter(D0, S1, Close(RunKey("another", 1))),
        letter(D0, S1, Close(RunKey("j", 2))),
        letter(D0, S1, PRUNE, sender=GRAPH),
    ):
        assert links.send(other, 0.0) == [other]
        assert links.arrive(other, 0.5) == ([other], [])


def test_a_join_is_held_until_the_answers_before_it_are_delivered() -> None:
    links = ExclusiveLinks((D0, S1, S2))
    rows = letter(D0, S1, ROWS)
    answer = letter(S2, D0, ANSWER)
    join = letter(D0, D0, Synced(RUN, "sync/1"), 0.0, sender=GRAPH)
    later = letter(S1, D0, ANSWER)
    links.send(rows, 0.0)
    assert links.send(answer, 0.0) == [], "D0 is busy"
    assert links.send(join, 0.5) == [join]
    assert links.arrive(join, 0.5) == ([], [])
    links.send(later, 0.75)
    assert links.arrive(rows, 1.0) == ([rows], [answer])
    assert links.arrive(answer, 2.0) == ([answer, join], [later]), "it waits for none sent later"


def test_a_join_is_not_held_by_another_run_or_another_receiver() -> None:
    links = ExclusiveLinks((D0, S1, S2))
    links.send(letter(S2, D0, ANSWER), 0.0)
    for join in (
        letter(D0, D0, Synced(RunKey("another", 1), "sync/1"), 0.0, sender=GRAPH),
        letter(D0, S1, Synced(RUN, "sync/1"), 0.0, sender=GRAPH),
    ):
        assert links.send(join, 0.0) == [join]
        assert links.arrive(join, 0.0) == ([join], [])
