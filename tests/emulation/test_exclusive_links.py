"""Letters on exclusive links: what is a transfer, and in which order a receiver gets a sender's
messages.
"""

from __future__ import annotations

from flowspec.core.protocol.messages import Answer, Close, Envelope, Message, Prune, Segment
from flowspec.emulation.exclusive_links import ExclusiveLinks, Letter, Transfer

ROWS = Segment("j", 1, 1, 1, (1,), (0,), (1,))
PRUNE = Prune("j", 1, 1, (), 1, ())


def letter(
    source: str, to: str, message: Message, seconds: float = 1.0, sender: str = ""
) -> Letter:
    return Letter(source, to, Envelope(sender or source, 1, message), seconds)


def test_rows_and_answers_that_take_time_between_two_nodes_are_transfers() -> None:
    assert letter("d0", "s1", ROWS).is_transfer
    assert letter("s1", "d0", Answer("j", 1, 1, (1,), (5,))).is_transfer
    assert not letter("d0", "s1", ROWS, 0.0).is_transfer
    assert not letter("s1", "s1", ROWS).is_transfer
    assert not letter("d0", "s1", PRUNE).is_transfer
    assert not letter("d0", "s1", Close("j", 1)).is_transfer


def test_what_overtakes_a_waiting_transfer_is_held_until_that_has_arrived() -> None:
    """Every sender numbers its messages: one that came early would read as a lost one."""
    links = ExclusiveLinks(("d0", "s1", "s2"))
    busy = letter("s1", "s2", ROWS)
    rows = letter("d0", "s1", ROWS)
    prune = letter("d0", "s1", PRUNE)
    assert links.send(busy, 0.0) == [busy]
    assert links.send(rows, 0.25) == []
    assert links.send(prune, 0.5) == [prune], "it is no transfer and travels at once"
    assert links.arrive(busy, 1.0) == ([busy], [rows])
    assert links.arrive(prune, 1.5) == ([], [])
    assert links.arrive(rows, 2.0) == ([rows, prune], [])
    assert links.log == [Transfer("s1", "s2", 0.0, 1.0), Transfer("d0", "s1", 1.0, 2.0)]


def test_other_senders_other_receivers_and_other_jobs_are_not_held() -> None:
    links = ExclusiveLinks(("d0", "s1", "s2"))
    links.send(letter("s1", "s2", ROWS), 0.0)
    assert links.send(letter("d0", "s1", ROWS), 0.0) == []
    for other in (
        letter("s2", "s1", PRUNE),
        letter("d0", "s2", PRUNE),
        letter("d0", "s1", Close("another", 1)),
        letter("d0", "s1", PRUNE, sender="graph"),
    ):
        assert links.send(other, 0.0) == [other]
        assert links.arrive(other, 0.5) == ([other], [])
