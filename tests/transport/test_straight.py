"""Messages that go straight into their receiver's inbox, and what happens when they cannot."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import redis

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.messages import Answer, Close, Envelope, Message, Open, Segment
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import BrokerError, ConfigError, GapError
from flowspec.transport.base import PutRows, role_of
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.link.inbox import FACT, Announced, Inbox, InboxPlace, open_inbox, why_none
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.link.peers import MOST_BANDWIDTH, MeasuredWay, PeerInbox, Peers
from flowspec.transport.wire import codec
from flowspec.transport.wire.keys import Keys
from tests.addresses import D0, S1, S2
from tests.transport.conftest import Rig, bundle, commit, send
from tests.waiting import until

TCP = InboxPlace(host="127.0.0.1")
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def segment(job: str, number: int, **more: object) -> Segment:
    return Segment(RunKey(job, 1), number, 0, (7, 8), (6, 7), (7, 8), **more)  # type: ignore[arg-type]


def opening(job: str) -> Open:
    return Open(RunKey(job, 1), 2, 100, Sampling())


@dataclass
class Pair:
    """A draft worker's link, stage 1's with an inbox, and a job that runs."""

    server: PrivateBroker
    rig: Rig
    place: InboxPlace = TCP
    given: list[LiveLink | Inbox] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = self.rig.control()
        self.inbox = open_inbox(self.server.url, Keys(), S1, self.place)
        self.announce(self.inbox.announced)
        self.stage = LiveLink(self.server.url, Keys(), S1, 2, inbox=self.inbox)
        self.given.append(self.stage)
        self.peers, self.draft = self.worker(D0, S1)
        self.job = self.rig.start(self.control, self.draft)

    def announce(self, announced: Announced, of: Address = S1) -> None:
        self.control.claim(role_of(of), "token", {FACT: announced.facts})

    def worker(self, address: Address, *receivers: Address) -> tuple[Peers, LiveLink]:
        peers = Peers(RedisControl(self.server.url, Keys()), receivers, straight=True)
        peers.start()
        peers.wait()
        link = LiveLink(self.server.url, Keys(), address, 2, peers=peers)
        self.given.append(link)
        return peers, link

    def open(self) -> None:
        self.draft.write([send(S1, self.job, 1, opening(self.job))])
        assert len(self.stage.read(2.0).envelopes) == 1

    def kill_inbox(self) -> None:
        server = self.inbox._server
        assert server is not None and server._process is not None
        server._process.kill()
        server._process.wait()

    def close(self) -> None:
        for link in self.given:
            link.close()
        self.rig.close()


@pytest.fixture
def pair(server: PrivateBroker, client: redis.Redis) -> Iterator[Pair]:
    client.ping()
    pair = Pair(server, Rig(url=server.url))
    yield pair
    pair.close()


def put(job: str, number: int) -> PutRows:
    return PutRows(S1, RunKey(job, 1), number, ROWS)


def entries_in(pair: Pair, key: str) -> int:
    client = connect(pair.server.url)
    found = int(client.xlen(key))
    client.close()
    return found


def test_a_segment_and_its_rows_are_one_entry_in_the_receivers_inbox(pair: Pair) -> None:
    pair.open()
    message = segment(pair.job, 3)
    pair.draft.write([put(pair.job, 3), send(S1, pair.job, 2, message)])
    (found,) = pair.stage.read(2.0).envelopes
    assert found == Envelope(D0, 2, message)
    assert (pair.stage.take_rows(RunKey(pair.job, 1), 3) == ROWS).all()
    assert entries_in(pair, Keys().rows(S1)) == 0
    assert entries_in(pair, Keys().log(S1)) == 1, "the Open alone"
    (link,) = pair.peers.facts()["links"].values()  # type: ignore[attr-defined]
    assert link["way"] == "straight"
    assert link["latency_ms"] >= 0 and (link["mbit"] is None or link["mbit"] > 0)


def test_segments_of_several_runs_and_their_rows_are_one_entry_there(pair: Pair) -> None:
    other = pair.rig.start(pair.control, pair.draft)
    jobs = (pair.job, other)
    for job in jobs:
        pair.draft.write([send(S1, job, 1, opening(job))])
        assert len(pair.stage.read(2.0).envelopes) == 1
    messages = [segment(job, 3) for job in jobs]
    before = pair.stage._inbox._untrimmed.entries  # type: ignore[union-attr]
    codes = pair.draft.write([*(put(job, 3) for job in jobs), bundle(S1, *messages, seq=2)])
    assert codes == [Code.OK] * 4
    found = pair.stage.read(2.0).envelopes
    assert [(envelope.seq, envelope.message) for envelope in found] == [(2, m) for m in messages]
    first, second = (envelope.bundle for envelope in found)
    assert first == second > 0
    assert pair.stage._inbox._untrimmed.entries == before + 1  # type: ignore[union-attr]
    for job in jobs:
        assert (pair.stage.take_rows(RunKey(job, 1), 3) == ROWS).all()


def test_of_a_bundle_a_part_that_has_ended_or_is_broken_is_dropped_alone(pair: Pair) -> None:
    other = pair.rig.start(pair.control, pair.draft)
    for job in (pair.job, other):
        pair.draft.write([send(S1, job, 1, opening(job))])
        assert len(pair.stage.read(2.0).envelopes) == 1
    sound = codec.encode(segment(pair.job, 3))
    inbox = pair.inbox.announced
    client = connect(pair.inbox._url)
    head = ["p", inbox.token, "f", "d0"]
    parts = ["q", 2, "m", sound, "q", 2, "m", b"broken"]
    client.execute_command("XADD", inbox.stream, "*", *head, *parts)  # type: ignore[no-untyped-call]
    client.close()
    read = pair.stage.read(2.0)
    assert [envelope.message for envelope in read.envelopes] == [segment(pair.job, 3)]
    (refused,) = read.refused
    assert "not of version" in refused
    pair.stage.forget(RunKey(other, 1))
    messages = [segment(job, 4) for job in (pair.job, other)]
    pair.draft.write([*(put(job, 4) for job in (pair.job, other)), bundle(S1, *messages, seq=3)])
    assert pair.stage.read(2.0).envelopes[0].message == messages[0]
    assert pair.stage._reader.drop(RunKey(other, 1), 4) is None
    assert (pair.stage.take_rows(RunKey(pair.job, 1), 4) == ROWS).all()


@pytest.mark.parametrize(
    "more", [{"task": "t", "after": ("u",)}, {"completes": ("t",)}], ids=["held", "completing"]
)
def test_what_the_task_graph_must_know_goes_through_the_broker(
    pair: Pair, more: dict[str, object]
) -> None:
    pair.open()
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 3), **more)])
    pair.draft.read(0.05)
    assert pair.peers.get(S1) is not None
    assert pair.peers.inboxes[0][1].client.under_way == 0
    client = connect(pair.inbox.announced.url)
    assert client.xlen(pair.inbox.announced.stream) == 0
    client.close()


def test_messages_on_both_ways_come_out_in_the_order_of_their_numbers(pair: Pair) -> None:
    messages: list[Message] = [opening(pair.job)]
    for number in range(20):
        messages += [segment(pair.job, number), Close(RunKey(pair.job, 1))]
    found: list[Envelope] = []
    for seq, message in enumerate(messages, 1):
        pair.draft.write([send(S1, pair.job, seq, message)])
    until(lambda: found.extend(pair.stage.read(0.1).envelopes) or len(found) == len(messages))
    assert [envelope.message for envelope in found] == messages


def test_prunes_and_segments_keep_their_order(pair: Pair) -> None:
    pair.open()
    for number in range(1, 30):
        written = [
            send(S1, pair.job, 2 * number, segment(pair.job, number)),
            commit(pair.job, number, seq=2 * number + 1),
        ]
        pair.draft.write(written)
    found: list[Envelope] = []
    until(lambda: found.extend(pair.stage.read(0.1).envelopes) or len(found) == 58)
    assert [envelope.seq for envelope in found] == list(range(2, 60))


def entry(pair: Pair, **changed: object) -> dict[str, object]:
    """An entry as the sender writes it."""
    good: dict[str, object] = {
        "p": pair.inbox.announced.token,
        "f": "d0",
        "q": 2,
        "m": codec.encode(segment(pair.job, 3)),
    }
    return {key: value for key, value in (good | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"p": "0123456789abcdef"}, "an entry for another inbox"),
        ({"p": None}, "an entry without field p"),
        ({"m": b"\xff\xfe"}, "not of version"),
        ({"f": "nobody"}, "an address is 'nobody'"),
        ({"q": "-1"}, "field q is not a number"),
        ({"m": codec.encode(Close(RunKey("1-0", 1)))}, "a Close does not go straight"),
    ],
)
def test_a_strangers_entry_is_refused_and_counted(
    pair: Pair, changed: dict[str, object], why: str
) -> None:
    pair.open()
    client = connect(pair.inbox.announced.url)
    client.xadd(pair.inbox.announced.stream, entry(pair, **changed))  # type: ignore[arg-type]
    client.close()
    found = pair.stage.read(2.0)
    (reason,) = found.refused
    assert why in reason
    assert found.envelopes == ()
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 3))])
    assert len(pair.stage.read(2.0).envelopes) == 1, "it reads on"


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"d": b"junk", "c": zlib.crc32(b"junk")}, "rows are not"),
        ({"d": codec.encode_rows(ROWS)}, "an entry without field c"),
        ({"d": codec.encode_rows(-ROWS), "c": zlib.crc32(codec.encode_rows(ROWS))}, "checksum"),
    ],
)
def test_a_segment_without_sound_rows_is_known_to_have_none(
    pair: Pair, payload: dict[str, object], why: str
) -> None:
    """So that its pass fails at once, instead of a wait for the segment."""
    pair.open()
    client = connect(pair.inbox.announced.url)
    client.xadd(pair.inbox.announced.stream, entry(pair, **payload))  # type: ignore[arg-type]
    client.close()
    found = pair.stage.read(2.0)
    (reason,) = found.refused
    assert why in reason
    assert len(found.envelopes) == 1
    with pytest.raises(GapError, match="the rows of segment 3 did not arrive"):
        pair.stage.take_rows(RunKey(pair.job, 1), 3)


def test_writers_may_only_write_into_the_one_stream(pair: Pair) -> None:
    client = connect(pair.inbox.announced.url)
    stream = pair.inbox.announced.stream
    forbidden = [
        ("XRANGE", stream, "-", "+"),
        ("DEL", stream),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("XADD", "elsewhere", "*", "a", "b"),
        ("XADD", f"{stream}-2", "*", "a", "b"),
        ("SET", stream, "x"),
    ]
    for command in forbidden:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    client.close()
    wrong = pair.inbox.announced.url.replace("peer:", "peer:wrong")
    with pytest.raises(redis.AuthenticationError):
        connect(wrong).ping()


@pytest.mark.parametrize("what", ["password", "port", "nonsense"])
def test_a_link_whose_inbox_cannot_be_reached_goes_through_the_broker(
    pair: Pair, what: str
) -> None:
    good = pair.inbox.announced
    url = {
        "password": good.url.replace("peer:", "peer:wrong"),
        "port": "redis://peer:x@127.0.0.1:9/0",
        "nonsense": "ftp://nowhere",
    }[what]
    pair.announce(Announced(url, good.stream, good.token))
    peers, link = pair.worker(D0, S1)
    assert peers.get(S1) is None
    (fact,) = peers.facts()["links"].values()  # type: ignore[attr-defined]
    assert fact["way"] == "broker"
    assert "wrong" not in fact["reason"]
    assert fact["reason"]
    link.write([send(S1, pair.job, 1, segment(pair.job, 1))])
    assert len(pair.stage.read(2.0).envelopes) == 1


def test_an_inbox_that_is_gone_from_its_server_is_not_written_to(pair: Pair) -> None:
    pair.open()
    owner = connect(pair.inbox._url)
    owner.delete(pair.inbox.announced.stream)
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    until(lambda: not pair.draft.read(0.01).envelopes and pair.peers.get(S1) is None)
    assert owner.exists(pair.inbox.announced.stream) == 0
    owner.close()
    assert len(pair.stage.read(2.0).envelopes) == 1, "it came through the broker"


def test_a_lost_inbox_ends_the_link_and_names_the_worker(pair: Pair) -> None:
    """Messages are lost with it: the worker begins anew, and its jobs are put back."""
    pair.open()
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    assert len(pair.stage.read(2.0).envelopes) == 1
    pair.kill_inbox()
    with pytest.raises(BrokerError, match="verify-1 has lost its inbox: ") as lost:
        until(lambda: pair.stage.read(0.1) == "never")
    assert "\n" not in str(lost.value)
    pair.draft.write([send(S1, pair.job, 3, segment(pair.job, 2))])
    until(lambda: pair.draft.read(0.01) and pair.peers.get(S1) is None)
    (link,) = pair.peers.facts()["links"].values()  # type: ignore[attr-defined]
    assert link["way"] == "broker"


def reason_of(pair: Pair) -> str:
    """Why the link to stage 1 does not go straight, as in the lease."""
    (link,) = pair.peers.facts()["links"].values()  # type: ignore[attr-defined]
    return str(link["reason"])


def lose_writes(pair: Pair) -> PeerInbox:
    """From now on what is written straight to stage 1 is lost on its way."""
    inbox = pair.peers.get(S1)
    assert inbox is not None
    inbox.client._transmit = lambda data: None  # type: ignore[method-assign]
    return inbox


def delivered(pair: Pair, count: int) -> list[int]:
    """The numbers of the next messages at stage 1, while the draft worker reads too."""
    found: list[Envelope] = []

    def all_of_them() -> bool:
        pair.draft.read(0.01)
        found.extend(pair.stage.read(0.1).envelopes)
        return len(found) >= count

    until(all_of_them)
    found.extend(pair.stage.read(0.2).envelopes)
    return [envelope.seq for envelope in found]


def test_what_was_not_confirmed_is_sent_again_and_delivered_once(pair: Pair) -> None:
    pair.open()
    pair.draft.write([put(pair.job, 1), send(S1, pair.job, 2, segment(pair.job, 1))])
    inbox = lose_writes(pair)
    pair.draft.write([send(S1, pair.job, 3, segment(pair.job, 2))])
    inbox.client._connection.disconnect()
    pair.draft.write([send(S1, pair.job, 4, segment(pair.job, 3))])
    assert pair.peers.get(S1) is None
    assert "its inbox at" in reason_of(pair)
    assert delivered(pair, 3) == [2, 3, 4]


def test_a_bundle_that_was_not_confirmed_is_sent_again_as_one(pair: Pair) -> None:
    other = pair.rig.start(pair.control, pair.draft)
    jobs = (pair.job, other)
    for job in jobs:
        pair.draft.write([send(S1, job, 1, opening(job))])
        assert len(pair.stage.read(2.0).envelopes) == 1
    inbox = lose_writes(pair)
    messages = [segment(job, 1) for job in jobs]
    pair.draft.write([*(put(job, 1) for job in jobs), bundle(S1, *messages, seq=2)])
    inbox.client._connection.disconnect()
    found: list[Envelope] = []
    until(lambda: (pair.draft.read(0.01) and found.extend(pair.stage.read(0.1).envelopes)) or found)
    assert [envelope.message for envelope in found] == messages
    first, second = (envelope.bundle for envelope in found)
    assert first == second > 0
    assert (pair.stage.take_rows(RunKey(other, 1), 1) == ROWS).all()


def test_a_link_that_breaks_behind_a_commit_keeps_the_order(pair: Pair) -> None:
    pair.open()
    inbox = lose_writes(pair)
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    inbox.client._connection.disconnect()
    pair.draft.write([commit(pair.job, 1, seq=3), send(S1, pair.job, 4, segment(pair.job, 2))])
    assert delivered(pair, 3) == [2, 3, 4]


def test_a_message_lost_before_a_commit_ends_the_link_in_one_line(pair: Pair) -> None:
    """The broker takes nothing behind the commit's prune, which stage 1 must not apply first."""
    pair.open()
    inbox = lose_writes(pair)
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    pair.draft.write([commit(pair.job, 1, seq=3)])
    inbox.client._connection.disconnect()
    broke = "^the link from d0 to s1 broke with messages under way: "
    with pytest.raises(BrokerError, match=broke) as lost:
        until(lambda: pair.draft.read(0.1) == "never")
    assert "\n" not in str(lost.value)


def test_a_link_whose_lease_announces_another_inbox_goes_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.transport.link.peers.LOOK_SECONDS", 0.05)
    old = pair.peers.get(S1)
    assert old is not None
    other = open_inbox(pair.server.url, Keys(), S1, TCP)
    pair.announce(other.announced)
    until(lambda: (found := pair.peers.get(S1)) is not None and found is not old)
    assert not old.client._connection.is_connected
    pair.peers.broken(S1, old, "a late error of the old one")
    assert pair.peers.get(S1) is not None
    pair.control.claim(role_of(S1), "token", {"state": "ready"})
    until(lambda: pair.peers.get(S1) is None)
    (link,) = pair.peers.facts()["links"].values()  # type: ignore[attr-defined]
    assert (link["way"], link["reason"]) == ("broker", "it has no inbox")
    pair.control.claim(role_of(S1), "token", {"state": "ready", "no_inbox": "it has lost it"})
    until(lambda: reason_of(pair) == "it has lost it")
    pair.control.claim(role_of(S1), "token", {"state": "ready", "no_inbox": "two\nlines"})
    until(lambda: reason_of(pair) == "it has no inbox")
    other.close()


@pytest.mark.live
def test_a_lease_that_is_only_late_costs_no_message(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker reads on, and keeps its jobs for a while: what was not confirmed must reach it."""
    monkeypatch.setattr("flowspec.transport.link.peers.LOOK_SECONDS", 0.05)
    pair.open()
    inbox = lose_writes(pair)
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    pair.control.release(role_of(S1), "token")
    until(lambda: role_of(S1) not in pair.peers.claims)
    time.sleep(0.2)  # some looks more
    assert pair.peers.get(S1) is inbox
    inbox.client._connection.disconnect()
    pair.draft.write([send(S1, pair.job, 3, segment(pair.job, 2))])
    assert delivered(pair, 2) == [2, 3]


def test_a_bandwidth_that_no_payload_shows_is_not_told() -> None:
    assert MeasuredWay(0.001, 125e6).facts == {"latency_ms": 1.0, "mbit": 1000.0}
    assert MeasuredWay(0.001, MOST_BANDWIDTH).facts == {"latency_ms": 1.0, "mbit": None}


def test_a_link_through_the_broker_tells_the_way_there(server: PrivateBroker) -> None:
    peers = Peers(RedisControl(server.url, Keys()), [S1], straight=False, url=server.url)
    peers.start()
    peers.wait()
    (link,) = peers.facts()["links"].values()  # type: ignore[attr-defined]
    assert link["way"] == "broker"
    assert 0 < link["latency_ms"] < 1000
    assert link["mbit"] is None or link["mbit"] > 0
    peers.close()


def test_a_server_that_refuses_to_tell_a_length_breaks_the_link_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.transport.link.peers._MEASURE_EVERY", 1)
    pair.open()
    inbox = pair.peers.get(S1)
    assert inbox is not None
    answers = [b"1-1", redis.ResponseError("NOPERM no xlen for you")]
    monkeypatch.setattr(inbox.client, "collect", lambda *, at_once: answers)
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    until(lambda: pair.draft.read(0.01) is not None and pair.peers.get(S1) is None)
    assert "no xlen for you" in str(pair.peers.facts())


def test_a_broken_link_is_tried_again_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.transport.link.peers.RETRY_SECONDS", 0.1)
    inbox = pair.peers.get(S1)
    assert inbox is not None
    pair.peers.broken(S1, inbox, "pulled the plug")
    assert pair.peers.get(S1) is None
    until(lambda: pair.peers.get(S1) is not None)


def test_an_unread_inbox_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.transport.link.peers.ROWS_CAP", 3)
    monkeypatch.setattr("flowspec.transport.link.peers._MEASURE_EVERY", 2)
    monkeypatch.setattr("flowspec.transport.link.tail.MOST_HELD", 1)
    pair.open()
    pair.draft.write([send(S1, pair.job, 2, segment(pair.job, 1))])
    for number in range(2, 12):
        pair.draft.write([send(S1, pair.job, 1 + number, segment(pair.job, number))])
    until(lambda: not pair.draft.read(0.01).envelopes and pair.peers.get(S1) is None)
    assert "its reader has stopped" in str(pair.peers.facts())
    found: list[Envelope] = []
    until(lambda: found.extend(pair.stage.read(0.1).envelopes) or len(found) == 11)
    assert [envelope.seq for envelope in found] == list(range(2, 13))


def test_a_server_given_by_url_keeps_nothing_of_a_closed_inbox(server: PrivateBroker) -> None:
    with PrivateBroker() as other:
        inbox = open_inbox(server.url, Keys(), S2, InboxPlace(url=other.url))
        client = connect(other.url)
        assert client.exists(inbox.announced.stream)
        inbox.close()
        inbox.close()
        assert client.keys() == []
        client.close()


def test_read_entries_are_removed(pair: Pair) -> None:
    pair.open()
    for number in range(100):
        pair.draft.write([send(S1, pair.job, 2 + number, segment(pair.job, number))])
        assert len(pair.stage.read(2.0).envelopes) == 1
        pair.draft.read(0.0)
    owner = connect(pair.inbox._url)
    until(lambda: owner.xlen(pair.inbox.announced.stream) <= 40)
    owner.close()


def test_auto_wants_an_inbox_only_where_the_broker_is_on_another_machine(
    server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = InboxPlace()
    assert why_none("auto", server.url, own) == "the broker is on its machine"
    assert not why_none("straight", server.url, own)
    assert why_none("broker", server.url, own)
    monkeypatch.setattr("flowspec.transport.link.inbox._ends", lambda url: ("10.0.0.2", "10.0.0.1"))
    assert not why_none("auto", "redis://10.0.0.1:6379/0", own)
    assert why_none("broker", "redis://10.0.0.1:6379/0", own)
    assert why_none("auto", "rediss://10.0.0.1:6379/0", own), "one of its own has no TLS"
    assert not why_none("auto", "rediss://10.0.0.1:6379/0", InboxPlace(url="rediss://10.0.0.3:1/0"))
    assert not why_none("straight", "rediss://10.0.0.1:6379/0", own), "and is refused with a line"
    with pytest.raises(ConfigError, match="expected one of auto, broker, straight"):
        why_none("fast", server.url, own)


def test_a_place_of_an_inbox_is_used_or_refused(server: PrivateBroker) -> None:
    given = InboxPlace(host="127.0.0.1")
    assert not why_none("auto", server.url, given), "also beside a broker on this machine"
    with pytest.raises(ConfigError, match="leave out the --inbox flags"):
        why_none("broker", server.url, given)
    with pytest.raises(ConfigError, match=r"^--inbox-url: broker URL foo is not understood"):
        open_inbox(server.url, Keys(), S1, InboxPlace(url="foo"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--inbox-port {port} is in use at 127.0.0.1"):
            open_inbox(server.url, Keys(), S1, InboxPlace(host="127.0.0.1", port=port))


def test_an_inbox_announces_another_address_if_told_to(server: PrivateBroker) -> None:
    place = InboxPlace(host="127.0.0.1", announce="relay.example:7000")
    inbox = open_inbox(server.url, Keys(), S1, place)
    assert inbox.announced.url.endswith("@relay.example:7000/0")
    inbox.close()
    with PrivateBroker() as other:
        place = InboxPlace(url=other.url.replace("unix", "unix"), announce="")
        inbox = open_inbox(server.url, Keys(), S1, place)
        assert inbox.announced.url == other.url
        inbox.close()


@pytest.mark.parametrize(
    ("place", "url", "why"),
    [
        (InboxPlace(host="203.0.113.7"), "unix:///x", "give an address of this machine"),
        (InboxPlace(), "rediss://h:1/0", "--inbox-url rediss://"),
    ],
)
def test_a_place_that_cannot_be_is_one_clear_line(place: InboxPlace, url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_inbox(url, Keys(), S1, place)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"announce": "far.example"}, "--inbox-announce is 'far.example'; expected HOST:PORT"),
        ({"announce": "far.example:99999"}, "expected HOST:PORT"),
        ({"port": 70_000}, "--inbox-port is 70000; expected 0"),
    ],
)
def test_an_address_that_cannot_be_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        InboxPlace(**more)


def test_an_inbox_on_a_unix_socket_is_shared_by_its_peers(server: PrivateBroker) -> None:
    inbox = open_inbox(server.url, Keys(), S1, InboxPlace())
    assert inbox.announced.url.startswith("unix://peer:")
    client = connect(inbox.announced.url)
    assert client.xlen(inbox.announced.stream) == 0
    client.close()
    inbox.close()


@pytest.mark.parametrize("facts", [None, "x", {}, {"url": 1, "stream": "s", "token": "t"}])
def test_facts_that_are_no_inbox_announce_none(facts: object) -> None:
    assert Announced.read(facts) is None


def test_answers_go_straight_too(pair: Pair) -> None:
    inbox = open_inbox(pair.server.url, Keys(), D0, TCP)
    pair.announce(inbox.announced, of=D0)
    draft = LiveLink(pair.server.url, Keys(), D0, 2, inbox=inbox)
    _, stage = pair.worker(S2, D0)
    answer = Answer(RunKey(pair.job, 1), 1, (7,), (9,))
    hidden = PutRows(D0, RunKey(pair.job, 1), 1, ROWS[:1])
    stage.write([hidden, Send(D0, Envelope(S2, 1, answer))])
    (found,) = draft.read(2.0).envelopes
    assert found.message == answer
    assert (draft.take_rows(RunKey(pair.job, 1), 1) == ROWS[:1]).all()
    draft.close()


def test_a_server_that_cannot_be_started_is_an_error(
    server: PrivateBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **more: object) -> None:
        raise BrokerError("no Redis or Valkey server found")

    monkeypatch.setattr("flowspec.transport.connections.server.find_server", none)
    with pytest.raises(BrokerError, match="no Redis or Valkey"):
        open_inbox(server.url, Keys(), S1, TCP)


@dataclass
class Offered:
    """An inbox that a thread has connected to."""

    announced: Announced

    def close(self) -> None:
        """Nothing is open."""


def test_a_broken_link_leaves_the_newer_inbox_that_was_offered_since() -> None:
    """Its offer was forgotten: the thread connected again, over what the first carried."""
    peers = Peers(None, [S1], straight=True)  # type: ignore[arg-type]
    old, new = (Offered(Announced("redis://h", stream, "t")) for stream in ("old", "new"))
    for offered in (old, new):
        peers._offered[S1] = offered.announced
        peers._offers[S1] = offered  # type: ignore[assignment]
        if offered is old:
            assert peers.get(S1) is old
    peers.broken(S1, old, "gone")  # type: ignore[arg-type]
    assert peers._offered[S1] == new.announced
    assert peers.get(S1) is new
