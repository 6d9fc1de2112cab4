from __future__ import annotations

import pytest

from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.errors import GapError


def test_last_plus_one_is_taken_older_is_ignored_a_hole_is_a_gap() -> None:
    reader = SeqReader()
    writer = SeqWriter()
    assert [writer.next("s1"), writer.next("s1"), writer.next("s2")] == [1, 2, 1]
    assert reader.accept("d0", 1)
    assert reader.accept("s1", 1), "senders are counted apart"
    assert reader.accept("d0", 2)
    assert not reader.accept("d0", 1)
    assert not reader.accept("d0", 2)
    with pytest.raises(GapError, match="message 4 from d0 arrived where 3 was due"):
        reader.accept("d0", 4)
    assert reader.accept("d0", 3), "a gap leaves the count where it was"
