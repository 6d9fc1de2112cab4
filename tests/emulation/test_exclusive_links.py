"""Messages on exclusive links: which are transfers, and the order per sender and receiver."""

from __future__ import annotations

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.messages import Answer, Close, Envelope, Message, Prune, Segment
from flowspec.core.run.key import RunKey
from flowspec.emulation.exclusive_links import ExclusiveLinks, Letter, Transfer
from tests.addresses import D0, S1, S2

RUN = RunKey("j", 1)
ROWS = Segment(RUN, 1, 1, (1,), (0,), (1,))
PRUNE = Prune(RUN, 1, (), 1, ())


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
    assert letter(S1, D0, Answer(RUN, 1, (1,), (5,))).is_transfer
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
