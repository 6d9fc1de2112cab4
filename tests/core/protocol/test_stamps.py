from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.stamps import Stamp, later
from flowspec.errors import WireError
from tests.addresses import D0, M1, S1, S2

SECONDS = st.floats(allow_nan=False, allow_infinity=False)
STAMPS = st.builds(Stamp, SECONDS, st.sampled_from([D0, S1, S2, M1]))


@given(st.none() | STAMPS, st.none() | STAMPS)
def test_the_later_one_is_given_and_none_is_no_stamp(
    one: Stamp | None, other: Stamp | None
) -> None:
    found = later(one, other)
    if one is None or other is None:
        assert found is (other if one is None else one)
    else:
        assert found in (one, other)
        assert found.at == max(one.at, other.at)


def test_of_equal_ones_the_second_is_given() -> None:
    one = Stamp(1.0, S1)
    other = Stamp(1.0, S2)
    assert later(one, other) is other
    assert later(other, one) is one


@given(STAMPS)
def test_a_stamp_read_back_is_the_same(stamp: Stamp) -> None:
    assert Stamp.read(stamp.text()) == stamp


@pytest.mark.parametrize(
    "text", ["", "1.0", "1.0 ", "soon d0", "nan d0", "inf s1", "1.0 x9", " d0"]
)
def test_anything_else_is_no_stamp(text: str) -> None:
    with pytest.raises(WireError):
        Stamp.read(text)
