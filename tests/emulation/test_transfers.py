"""PipeDec's transfer scheduler: random nodes, requests and orders of completion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.emulation.transfers import Transfers
from flowspec.errors import StateError

NODES = ("d0", "s1", "s2", "s3", "s4")
PAIRS = st.permutations(NODES).map(lambda nodes: (nodes[0], nodes[1]))


def none_waits_needlessly(transfers: Transfers) -> None:
    ends = list(transfers.under_way.values())
    busy = [node for pair in ends for node in pair]
    assert len(busy) == len(set(busy)), "a node in two transfers at once"
    assert all(set(pair) & set(busy) for pair in transfers.waiting.values()), (
        "waits though both ends are free"
    )


@given(st.lists(PAIRS, max_size=30), st.data())
def test_transfers_exclude_each_other_and_all_get_their_turn(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Requests and completions in any mixture; each answer names what moved from waiting to under
    way.
    """
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
        assert [name for name in started if name in own] == own, "first asked, first started"


def test_a_transfer_passes_an_older_one_whose_ends_are_busy() -> None:
    transfers = Transfers(NODES)
    assert transfers.request("a", "d0", "s1") == ["a"]
    assert transfers.request("b", "s1", "s2") == []
    assert transfers.request("c", "s2", "s3") == ["c"]
    assert transfers.request("d", "s4", "d0") == []
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
    transfers.request("a", "d0", "s1")
    transfers.request("b", "s1", "s2")
    with pytest.raises(StateError, match="z is said to be complete but is not known"):
        transfers.complete("z")
    with pytest.raises(StateError, match="b is said to be complete but did not start yet"):
        transfers.complete("b")
    with pytest.raises(StateError, match="unknown node s9"):
        transfers.request("c", "d0", "s9")
    with pytest.raises(StateError, match="s1 as both ends"):
        transfers.request("c", "s1", "s1")
    with pytest.raises(StateError, match="from s1 to d0, but was from d0 to s1"):
        transfers.request("a", "s1", "d0")
    assert (list(transfers.under_way), list(transfers.waiting)) == (["a"], ["b"])


def test_only_the_last_that_ended_are_remembered() -> None:
    """Late words about those change nothing; an older name is free, and the state stays small for
    ever.
    """
    transfers = Transfers(NODES, remembered=3)
    for at in range(50):
        assert transfers.request(f"t{at}", "d0", "s1") == [f"t{at}"]
        assert transfers.complete(f"t{at}") == []
        for known in range(max(0, at - 2), at + 1):
            assert (
                transfers.complete(f"t{known}") == transfers.request(f"t{known}", "d0", "s1") == []
            )
        if at >= 3:
            with pytest.raises(
                StateError, match=f"t{at - 3} is said to be complete but is not known"
            ):
                transfers.complete(f"t{at - 3}")
    assert transfers.under_way == transfers.waiting == {}
    assert transfers.request("t0", "s2", "s3") == ["t0"]


def test_a_transfer_under_way_is_remembered_however_many_have_ended() -> None:
    transfers = Transfers(NODES, remembered=1)
    transfers.request("slow", "s1", "s2")
    transfers.request("waits", "s2", "s3")
    for at in range(20):
        transfers.request(f"t{at}", "d0", "s4")
        transfers.complete(f"t{at}")
    assert transfers.request("slow", "s1", "s2") == transfers.request("waits", "s2", "s3") == []
    assert transfers.complete("slow") == ["waits"]
