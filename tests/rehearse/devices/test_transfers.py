"""PipeDec's transfer scheduler: random nodes, requests and orders of completion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import Address, stage_address
from flowspec.errors import StateError
from flowspec.rehearse.devices.transfers import Transfers
from tests.addresses import D0, S1, S2, S3, S4

NODES = (D0, S1, S2, S3, S4)
PAIRS = st.permutations(NODES).map(lambda nodes: (nodes[0], nodes[1]))


def none_waits_needlessly(transfers: Transfers) -> None:
    ends = list(transfers.under_way.values())
    busy = [node for pair in ends for node in pair]
    assert len(busy) == len(set(busy)), "a node in two transfers at once"
    assert all(set(pair) & set(busy) for pair in transfers.waiting.values()), (
        "waits although both ends are free"
    )


@given(st.lists(PAIRS, max_size=30), st.data())
def test_transfers_exclude_each_other_and_all_get_their_turn(
    pairs: list[tuple[Address, Address]], data: st.DataObject
) -> None:
    """Random requests and completions; each call returns the transfers that started."""
    transfers = Transfers(NODES)
    started = list[str]()
    requests = [(f"t{at}", *pair) for at, pair in enumerate(pairs)]
    todo = list(requests)
    ended = list[str]()
    while todo or transfers.under_way:
        before = set(transfers.under_way)
        if todo and (not before or data.draw(st.booleans())):
            fresh = transfers.request(*todo.pop(0))
        else:
            ended.append(data.draw(st.sampled_from(sorted(before))))
            fresh = transfers.complete(ended[-1])
        assert set(transfers.under_way) == before - set(ended) | set(fresh)
        started += fresh
        none_waits_needlessly(transfers)
        assert all(transfers.complete(name) == [] for name in ended), "completing again is harmless"
    assert transfers.waiting == {}
    assert sorted(started) == sorted(name for name, *_ in requests), "each starts once"
    for pair in set(pairs):
        own = [name for name, *ends in requests if tuple(ends) == pair]
        assert [name for name in started if name in own] == own, "first requested, first started"


def test_a_transfer_passes_an_older_one_whose_ends_are_busy() -> None:
    transfers = Transfers(NODES)
    assert transfers.request("a", D0, S1) == ["a"]
    assert transfers.request("b", S1, S2) == []
    assert transfers.request("c", S2, S3) == ["c"]
    assert transfers.request("d", S4, D0) == []
    assert transfers.complete("a") == ["d"]
    assert transfers.complete("c") == ["b"]


@given(PAIRS)
def test_asking_again_is_harmless(pair: tuple[str, str]) -> None:
    transfers = Transfers(NODES)
    assert transfers.request("a", *pair) == ["a"]
    assert transfers.request("b", *pair) == []
    assert transfers.request("a", *pair) == transfers.request("b", *pair) == []
    assert transfers.complete("a") == ["b"]
    assert transfers.request("a", *pair) == []
    assert list(transfers.under_way) == ["b"]


def test_what_nobody_knows_is_an_error_and_changes_nothing() -> None:
    transfers = Transfers(NODES)
    transfers.request("a", D0, S1)
    transfers.request("b", S1, S2)
    with pytest.raises(StateError, match="z is said to be complete but is not known"):
        transfers.complete("z")
    with pytest.raises(StateError, match="b is said to be complete but did not start yet"):
        transfers.complete("b")
    with pytest.raises(StateError, match="unknown node s9"):
        transfers.request("c", D0, stage_address(9))
    with pytest.raises(StateError, match="s1 as both ends"):
        transfers.request("c", S1, S1)
    with pytest.raises(StateError, match="from s1 to d0, but was from d0 to s1"):
        transfers.request("a", S1, D0)
    assert (list(transfers.under_way), list(transfers.waiting)) == (["a"], ["b"])


def test_only_the_last_that_ended_are_remembered() -> None:
    """Late calls about those change nothing; older names are free, so the state is bounded."""
    transfers = Transfers(NODES, remembered=3)
    for at in range(50):
        assert transfers.request(f"t{at}", D0, S1) == [f"t{at}"]
        assert transfers.complete(f"t{at}") == []
        for known in range(max(0, at - 2), at + 1):
            assert transfers.complete(f"t{known}") == transfers.request(f"t{known}", D0, S1) == []
        if at >= 3:
            with pytest.raises(
                StateError, match=f"t{at - 3} is said to be complete but is not known"
            ):
                transfers.complete(f"t{at - 3}")
    assert transfers.under_way == transfers.waiting == {}
    assert transfers.request("t0", S2, S3) == ["t0"]


def test_a_transfer_under_way_is_remembered_however_many_have_ended() -> None:
    transfers = Transfers(NODES, remembered=1)
    transfers.request("slow", S1, S2)
    transfers.request("waits", S2, S3)
    for at in range(20):
        transfers.request(f"t{at}", D0, S4)
        transfers.complete(f"t{at}")
    assert transfers.request("slow", S1, S2) == transfers.request("waits", S2, S3) == []
    assert transfers.complete("slow") == ["waits"]
