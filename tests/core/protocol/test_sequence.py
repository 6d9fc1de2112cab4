from __future__ import annotations

import pytest

from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.errors import GapError
from tests.addresses import D0, S1, S2


def test_last_plus_one_is_taken_older_is_ignored_a_hole_is_a_gap() -> None:
    reader = SeqReader()
    writer = SeqWriter()
    assert [writer.next(S1), writer.next(S1), writer.next(S2)] == [1, 2, 1]
    assert reader.accept(D0, 1)
    assert reader.accept(S1, 1), "senders are counted apart"
    assert reader.accept(D0, 2)
    assert not reader.accept(D0, 1)
    assert not reader.accept(D0, 2)
    with pytest.raises(GapError, match="a message was lost: 4 from d0 arrived where 3 was due"):
        reader.accept(D0, 4)
    assert reader.accept(D0, 3), "a gap leaves the count where it was"
