from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import (
    DRAFT,
    GRAPH,
    SCHEDULER,
    Address,
    Role,
    middle_address,
    stage_address,
    worker_addresses,
)
from flowspec.errors import WireError

#: As many as the text of an address has digits for.
NUMBERS = st.integers(1, 999_999)
NUMBERED = st.builds(stage_address, NUMBERS) | st.builds(middle_address, NUMBERS)
ADDRESSES = st.sampled_from([DRAFT, SCHEDULER, GRAPH]) | NUMBERED

#: Texts that are like addresses: what a careless parser would take.
NEARLY = st.from_regex(r"\A[dsm]?[0-9+\- _.٠-٩²]{0,8}\Z") | st.from_regex(
    r"\A(scheduler|graph|d0|s1|m1)?[ \n0-9]?(scheduler|graph|d0|s1|m1)?\Z"
)


@given(ADDRESSES)
def test_parse_is_the_inverse_of_str(address: Address) -> None:
    assert Address.parse(str(address)) == address


@given(ADDRESSES, ADDRESSES)
def test_no_two_addresses_share_a_text(one: Address, other: Address) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(st.text() | NEARLY)
def test_anything_else_is_a_wire_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except WireError:
        return
    assert str(address) == text
    assert address in (DRAFT, SCHEDULER, GRAPH) or address.role in (Role.VERIFY, Role.MIDDLE)
    assert address.role not in (Role.VERIFY, Role.MIDDLE) or address.number >= 1


@pytest.mark.parametrize(
    "texts",
    [
        ["", " ", "s1 ", " s1", "s1\n", "graph "],
        ["d", "d1", "d00", "d-0"],
        ["s", "s0", "s01", "s-1", "s+1", "S1", "s1000000", "s1s1", "s²", "s١", "stage1"],
        ["m", "m0", "m00", "x1"],
        ["Graph", "graph0", "scheduler1"],
    ],
)
def test_these_are_no_addresses(texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(WireError, match="expected one like d0, s1, m1 or scheduler"):
            Address.parse(text)


def test_a_long_text_is_shown_in_part() -> None:
    with pytest.raises(WireError) as raised:
        Address.parse("x" * 1000)
    assert len(str(raised.value)) < 100


def test_the_texts_are_those_on_the_wire() -> None:
    assert list(map(str, worker_addresses(2, 2))) == ["d0", "s1", "s2", "m1", "m2"]
    assert (str(SCHEDULER), str(GRAPH)) == ("scheduler", "graph")
