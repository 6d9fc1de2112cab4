"""The links of a message, its order at the receiver, and what a wrong place for the broker says."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import GRAPH, Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.machine import Commit, Complete, Send
from flowspec.core.protocol.messages import (
    Answer,
    Close,
    Envelope,
    Message,
    Prune,
    Segment,
)
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.arrivals import Arrivals, Parcel
from flowspec.rehearse.devices.departures import Departures
from flowspec.rehearse.devices.links import DirectedLinks, Leg
from flowspec.rehearse.devices.way import (
    NO_BROKER,
    OWN_BOX,
    Travelling,
    Way,
    goes_straight,
    travelling,
)
from tests.addresses import D0, S1, S2, S3

RUN = RunKey("j", 1)
OTHER = RunKey("k", 1)
SEGMENT = Segment(RUN, 1, 1, (1,), (0,), (1,), (7,))
ANSWER = Answer(RUN, 1, (1,), (7,))
PRUNE = Prune(RUN, 0, (1,), 2, ())
LATENCY = 1.0
#: Seconds for which a message keeps a link.
KEPT = 0.25
WAYS = [
    Way(at, rows)
    for at in ("draft", "stage-1", "stage-2", "stage-3", "own")
    for rows in ("straight", "broker")
]


def send(sender: Address, to: Address, message: Message = SEGMENT, **more: object) -> Send:
    return Send(to, Envelope(sender, 1, message), **more)  # type: ignore[arg-type]


def commit() -> Commit:
    to = (S1, S2, S3)
    return Commit(RUN, 0, 0, 1, (7,), "", to, tuple(Envelope(D0, 1, PRUNE) for _ in to))


def links() -> DirectedLinks:
    return DirectedLinks(lambda *_: LATENCY, lambda *_: KEPT)


# ---- which way ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "straight"),
    [
        (send(D0, S1), True),
        (send(S3, D0, ANSWER), True),
        (send(D0, S1, SEGMENT, task="t", after=("a",)), False),
        (send(S3, D0, ANSWER, completes=("t",)), False),
        (send(D0, S1, Close(RUN)), False),
        (send(D0, S1, PRUNE), False),
        (commit(), False),
        (Complete(RUN, ("t",)), False),
    ],
)
def test_rows_go_straight_unless_the_graph_holds_or_completes_something(
    output: Travelling, straight: bool
) -> None:
    assert goes_straight(output) == straight
    assert Way("own", "straight").is_straight(output) == straight
    assert not Way("own", "broker").is_straight(output)


@pytest.mark.parametrize(
    ("way", "route"),
    [
        (NO_BROKER, (S1, S2)),
        (Way("own"), (S1, S2)),
        (Way("own", "broker"), (S1, OWN_BOX, S2)),
        (Way("draft", "broker"), (S1, D0, S2)),
        (Way("stage-1", "broker"), (S1, S2)),
        (Way("stage-2", "broker"), (S1, S2)),
        (Way("stage-3", "broker"), (S1, S3, S2)),
    ],
)
def test_a_route_leaves_out_links_within_a_box(way: Way, route: tuple[Address, ...]) -> None:
    assert way.route(S1, send(S1, S2)) == route


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_a_worker_sends_itself_stays_in_its_box_or_goes_to_the_broker_and_back(
    way: Way,
) -> None:
    join = send(D0, D0, Close(RUN), task="t")
    assert way.box is not None
    assert way.route(D0, join) == ((D0,) if way.at == "draft" else (D0, way.box, D0))


def test_a_commit_crosses_to_the_broker_once_with_its_prune() -> None:
    assert [one.message for one in travelling(commit(), D0)] == [PRUNE]
    assert Departures(Way("own"), D0, links()).stamp(commit(), 5.0) == Stamp(6.25, OWN_BOX)
    assert Departures(Way("draft"), D0, links()).stamp(commit(), 5.0) == Stamp(5.0, D0)


def test_receivers_charge_the_links_out_of_the_brokers_box_and_senders_all_others() -> None:
    """Messages of several senders meet on the former, and no sender knows of the others'."""
    beside = Departures(Way("draft"), D0, links())
    assert beside.stamp(send(D0, S1), 5.0) == Stamp(5.0, D0)
    away = Departures(Way("stage-2"), D0, links())
    assert away.stamp(send(D0, S1), 5.0) == Stamp(6.25, S1)
    assert away.stamp(send(D0, S1, completes=("t",)), 5.0) == Stamp(6.25, S2)
    assert away.stamp(send(D0, S2), 5.0) == Stamp(6.5, S2), "straight, behind the one before it"
    assert Departures(NO_BROKER, D0, links()).stamp(send(D0, S1), 5.0) == Stamp(5.0, D0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"at": "moon"}, "at is 'moon'; expected draft, stage-N (like stage-2), own or none"),
        ({"at": "stage-0"}, "at is 'stage-0'; expected draft"),
        ({"at": "stage-"}, "at is 'stage-'; expected draft"),
        ({"at": "stage-01"}, "at is 'stage-01'; expected draft"),
        ({"at": "rows-2"}, "at is 'rows-2'; expected draft"),
        ({"rows": "up"}, "rows is 'up'; expected straight (to their receiver) or broker (through"),
        ({"at": "none", "rows": "broker"}, "rows is 'broker', but at is 'none'; expected a place"),
    ],
)
def test_what_is_no_way_is_refused(fields: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Way(**fields)


def test_a_place_beside_a_stage_needs_that_stage() -> None:
    Way("stage-4").check(4)
    with pytest.raises(
        ConfigError, match=r"at 'stage-4', but there are 3 stages; .* up to stage-3"
    ):
        Way("stage-4").check(3)


# ---- links ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([D0, S1])), min_size=1))
def test_a_link_carries_one_message_at_a_time(entered: list[tuple[float, Address]]) -> None:
    found = links()
    envelope = Envelope(S1, 1, Close(RUN))
    last: dict[Address, float] = {}
    for at, source in sorted(entered, key=lambda one: one[0]):
        arrival = found.arrival(Leg(source, S2), S2, [envelope], at)
        assert arrival >= at + LATENCY + KEPT - 1e-9
        assert arrival >= last.get(source, 0.0) + KEPT - 1e-9
        last[source] = arrival
    assert found.arrival(Leg(S2, S2), S2, [envelope], 3.0) == 3.0, (
        "a message to itself uses no link"
    )


def delivered(way: Way, output: Send, sender: Address, at: float = 0.0) -> float:
    """When a message that is alone on all links arrives."""
    found = links()
    stamp = Departures(way, sender, found).stamp(output, at)
    arrivals = Arrivals(output.to, found)
    parcel = Parcel(stamp, (output.envelope,))
    arrivals.expect(parcel)
    ((arrival, known),) = arrivals.enter(parcel)
    assert known is parcel
    return arrival


@pytest.mark.parametrize("way", [NO_BROKER, *WAYS], ids=str)
@pytest.mark.parametrize("completes", [(), ("t",)], ids=["rows", "task"])
@pytest.mark.parametrize(("sender", "to"), [(D0, S1), (S1, S2), (S3, D0)], ids=str)
def test_a_lone_message_takes_every_link_of_its_route(
    way: Way, sender: Address, to: Address, completes: tuple[str, ...]
) -> None:
    output = send(sender, to, completes=completes)
    crossed = len(way.route(sender, output)) - 1
    assert delivered(way, output, sender, 2.0) == pytest.approx(2.0 + crossed * (LATENCY + KEPT))


#: Moments, senders, receivers and runs of entries, and whether they are segments or, of the first
#: run alone, need the broker.
TRAFFIC = st.lists(
    st.tuples(
        st.floats(0, 9),
        st.sampled_from([D0, S1, S2]),
        st.sampled_from([S1, S2]),
        st.sampled_from([(RUN,), (OTHER,), (RUN, OTHER)]),
        st.booleans(),
    ),
    max_size=30,
)


@given(
    TRAFFIC,
    st.sampled_from(WAYS),
    st.dictionaries(st.tuples(*[st.sampled_from([D0, S1, S2, S3, OWN_BOX])] * 2), st.floats(0, 5)),
    st.floats(0, 2),
)
def test_a_senders_messages_arrive_in_order_on_any_ways_and_none_before_its_links_allow(
    traffic: list[tuple[float, Address, Address, tuple[RunKey, ...], bool]],
    way: Way,
    latencies: dict[tuple[Address, Address], float],
    kept: float,
) -> None:
    def latency(source: Address, target: Address, _: object) -> float:
        return latencies.get((source, target), 1.0)

    found = DirectedLinks(latency, lambda *_: kept)
    nodes = (D0, S1, S2)
    departures = {node: Departures(way, node, found) for node in nodes}
    arrivals = {node: Arrivals(node, found) for node in nodes}
    seqs: dict[tuple[RunKey, Address, Address], int] = {}
    parcels = []
    least: dict[int, float] = {}
    for at, sender, to, runs, is_segment in sorted(traffic):
        sends = []
        for run in runs if is_segment else runs[:1]:
            seq = seqs[run, sender, to] = seqs.get((run, sender, to), 0) + 1
            message = replace(SEGMENT if is_segment else PRUNE, run=run)
            sends.append(Send(to, Envelope(sender, seq, message)))
        output = Bundle(tuple(sends)) if len(sends) > 1 else sends[0]
        entry = tuple(send.envelope for send in sends)
        parcel = Parcel(departures[sender].stamp(output, at), entry)
        arrivals[to].expect(parcel)
        parcels.append((to, parcel))
        legs = itertools.pairwise(way.route(sender, sends[0]))
        taken = kept * len(sends)
        least[id(parcel)] = at + math.fsum(taken + latency(*leg, None) for leg in legs)
    order: dict[tuple[RunKey, Address, Address], list[tuple[float, int]]] = {}
    for to, parcel in sorted(parcels, key=lambda one: one[1].stamp.at):
        for arrival, known in arrivals[to].enter(parcel):
            assert arrival >= least[id(known)] - 1e-9
            for envelope in known.entry:
                channel = (envelope.message.run, envelope.sender, to)
                order.setdefault(channel, []).append((arrival, envelope.seq))
    for channel, count in seqs.items():
        assert [seq for _, seq in order[channel]] == list(range(1, count + 1))
        moments = [arrival for arrival, _ in order[channel]]
        assert moments == sorted(moments)


def test_a_bundle_occupies_a_link_for_all_its_messages_and_arrives_as_a_whole() -> None:
    found = links()
    first, second = (Envelope(S1, 1, replace(SEGMENT, run=run)) for run in (RUN, OTHER))
    bundle = Bundle((Send(S2, first), Send(S2, second)))
    arrivals = Arrivals(S2, found)
    parcel = Parcel(Departures(NO_BROKER, S1, found).stamp(bundle, 0.0), (first, second))
    arrivals.expect(parcel)
    assert arrivals.enter(parcel) == [(2 * KEPT + LATENCY, parcel)]


def test_a_bundle_waits_for_what_is_due_before_any_of_its_runs() -> None:
    found = links()
    arrivals = Arrivals(S2, found)
    early, other = (Envelope(S1, 1, replace(SEGMENT, run=run)) for run in (RUN, OTHER))
    late = (replace(early, seq=2), replace(other, seq=2))
    before = [Parcel(Stamp(9.0, S1), (early,)), Parcel(Stamp(0.0, S1), (other,))]
    bundle = Parcel(Stamp(1.0, S1), late)
    after = Parcel(Stamp(2.0, S1), (replace(other, seq=3),))
    for parcel in (*before, bundle, after):
        arrivals.expect(parcel)
    ((_, first),) = arrivals.enter(before[1])
    assert first is before[1]
    assert arrivals.enter(bundle) == []
    assert arrivals.enter(after) == []
    arrived = arrivals.enter(before[0])
    assert [parcel for _, parcel in arrived] == [before[0], bundle, after]
    assert len({at for at, _ in arrived}) == 1


def test_a_straight_message_waits_for_the_one_before_it_that_goes_by_the_broker() -> None:
    found = links()
    way = Way("own")
    departures = Departures(way, S1, found)
    arrivals = Arrivals(S2, found)
    slow, fast = (Envelope(S1, seq, message) for seq, message in ((1, Close(RUN)), (2, SEGMENT)))
    first = Parcel(departures.stamp(Send(S2, slow), 0.0), (slow,))
    second = Parcel(departures.stamp(Send(S2, fast), 0.5), (fast,))
    arrivals.expect(first)
    arrivals.expect(second)
    assert arrivals.is_here(second) and not arrivals.is_here(first)
    assert second.stamp.at == 1.75
    assert arrivals.enter(second) == []
    assert arrivals.enter(first) == [(2.5, first), (2.5, second)]


def test_the_graphs_messages_are_in_their_own_order() -> None:
    found = links()
    arrivals = Arrivals(S2, found)
    held = Parcel(Stamp(5.0, OWN_BOX), (Envelope(GRAPH, 1, SEGMENT),))
    other = Parcel(Stamp(1.0, OWN_BOX), (Envelope(D0, 1, PRUNE),))
    later = Parcel(Stamp(3.0, OWN_BOX), (Envelope(GRAPH, 2, SEGMENT),))
    for parcel in (held, other, later):
        arrivals.expect(parcel)
    assert arrivals.enter(other) == [(2.25, other)]
    assert arrivals.enter(later) == []
    assert arrivals.enter(held) == [(6.25, held), (6.25, later)]
