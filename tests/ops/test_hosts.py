"""Hosts in namespaces: what the switch passes, what is measured, and the tables' verdicts."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.cluster import Setup
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pass
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ClusterError, ConfigError
from flowspec.model.empty_stage import PassingStage
from flowspec.model.weights.directory import default_pair
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profile import Profile, Times
from ops.bench import hosts
from ops.bench.emulation import simulated
from ops.bench.hosts import SOURCE, HostTimes
from ops.bench.hosts_table import (
    BROKER,
    PLAIN,
    STRAIGHT,
    Decoded,
    Given,
    Linkage,
    parts_table,
    plain_table,
    strategies_table,
    verdict,
)
from ops.hosts.echo import one_way
from ops.hosts.network import check, network
from ops.hosts.paced import PacedStages, StageTimes
from ops.hosts.resting_stage import RestingStage
from ops.hosts.switch import Delay, host_of, serve
from tests.ops.test_bench import printed
from tests.waiting import seconds_of

RUN = RunKey("job", 1)
TEXT = Text(tuple(range(3, 10)), tuple(range(20, 29)), Sampling())


def has_hosts() -> bool:
    try:
        check()
    except ConfigError:
        return False
    return True


needs_hosts = pytest.mark.skipif(not has_hosts(), reason="needs root and /dev/net/tun")


def packet(host: int, *, body: bytes = b"") -> bytes:
    """An IPv4 packet for a host of the network, as far as the switch reads it."""
    return bytes([0x45, *[0] * 15, 198, 18, 0, host]) + body


# ---- the switch ----------------------------------------------------------------------------------


@given(host=st.integers(0, 255), body=st.binary())
def test_a_packet_names_its_host(host: int, body: bytes) -> None:
    assert host_of(packet(host, body=body)) == host


@given(st.binary(max_size=60))
def test_what_is_for_no_host_of_the_network_is_known(data: bytes) -> None:
    inside = len(data) >= 20 and data[0] >> 4 == 4 and data[16:19] == bytes([198, 18, 0])
    assert host_of(data) == (data[19] if inside else 0)


@given(
    latencies=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    gaps=st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_every_packet_takes_the_latency_and_none_overtakes(
    latencies: list[float], gaps: list[float]
) -> None:
    delay = Delay(0.0)
    now = 0.0
    due: list[float] = []
    for number, (latency, gap) in enumerate(zip(latencies, gaps, strict=False)):
        now += gap
        delay.latency = latency
        delay.take(packet(1, body=bytes([number])), now)
        due.append(max([now + latency, *due]))
    came: list[int] = []
    while (left := delay.left(now)) is not None:
        now += left
        found = delay.due(now)
        assert all(due[body[20]] <= now + 1e-9 for _, body in found)
        came += [body[20] for _, body in found]
    assert came == list(range(len(latencies)))


@pytest.fixture
def ports() -> Iterator[tuple[list[socket.socket], int]]:
    """The hosts' ends of a switch between two, and where its latencies are written."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for inner, outer in pairs:
        inner.setblocking(False)
        outer.settimeout(5)
    orders, told = os.pipe()
    files = [inner.fileno() for inner, _ in pairs]
    thread = threading.Thread(target=serve, args=(files, orders, Delay(0.0)), daemon=True)
    thread.start()
    yield [outer for _, outer in pairs], told
    os.close(told)
    thread.join(5)
    assert not thread.is_alive(), "it ends with its orders"
    os.close(orders)
    for pair in pairs:
        for end in pair:
            end.close()


def test_packets_reach_their_host_and_no_other(ports: tuple[list[socket.socket], int]) -> None:
    (one, two), _ = ports
    one.send(b"nothing that is known")
    one.send(packet(9))
    one.send(packet(2, body=b"a"))
    two.send(packet(1, body=b"b"))
    assert two.recv(100) == packet(2, body=b"a")
    assert one.recv(100) == packet(1, body=b"b")


def test_a_new_latency_holds_from_then_on(ports: tuple[list[socket.socket], int]) -> None:
    (one, two), told = ports
    os.write(told, b"30\n")
    time.sleep(0.1)

    def carry() -> None:
        one.send(packet(2))
        two.recv(100)

    assert seconds_of(carry) >= 0.029


@needs_hosts
def test_a_link_between_hosts_takes_its_latency(tmp_path: Path) -> None:
    with network(2, tmp_path) as running:
        # A busy machine delays most round trips by some milliseconds.
        assert 0.005 < one_way(running, 0.02, 5, tmp_path) < 0.1


def test_a_machine_without_namespaces_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["hosts", "--busy"])
    with pytest.raises(SystemExit) as ended:
        hosts.main()
    assert str(ended.value).startswith("hosts: this machine has no network namespaces")


# ---- what is measured ----------------------------------------------------------------------------


def test_a_resting_stage_rests_as_told_when_the_run_begins(tmp_path: Path) -> None:
    file = tmp_path / "seconds"
    file.write_text("0.25")
    rests: list[float] = []
    stage = RestingStage(PassingStage(), file, rests.append)
    stage.allocate(RUN, 8, Sampling(), Returns())
    file.write_text("9")
    ids = (0, 1)
    given = np.ones((2, 3), dtype=np.float32)
    work = Pass((Part(RUN, 1, ids, (-1, 0), ids, (), ids, context=2),))
    _, (rows,) = stage.run(work, [given])
    stage.release(RUN)
    assert rests == [0.25]
    assert np.array_equal(rows, given)


@pytest.mark.heavy
def test_a_stage_that_ended_while_measured_is_one_error() -> None:
    with PacedStages("/no/such/model", 1, 4) as stages, pytest.raises(ClusterError, match="ended"):
        stages.measure((1,), 0.0, 1)


@pytest.mark.heavy
def test_paced_passes_rest_before_each() -> None:
    rests: list[float] = []
    with PacedStages(default_pair()[0], 2, 4) as stages:
        found = stages.measure((1, 4), 0.5, 2, rests.append)
    assert rests == [0.5] * (2 * 2 * 3), "of two counts of rows, two stages and three passes"
    for stage in found:
        assert [rows for rows, _ in stage.whole.points] == [1, 4]
        assert 0 < stage.model.at(1) <= stage.whole.at(1)


# ---- the profile ---------------------------------------------------------------------------------


@pytest.fixture
def machine() -> HostTimes:
    flat = Times(((1, 0.004),))
    smaller = Times(((1, 0.003),))
    drafters = {SOURCE: Times(((1, 0.001),))}
    found = HostTimes(drafters)
    for way, latency in product((STRAIGHT, BROKER), (0.0, 5.0)):
        place = Linkage(way, latency)
        found.passes[place] = [StageTimes(flat, smaller)] * 4
        found.links[place] = latency / 1e3
        found.hops[place] = 0.0005
    return found


@pytest.mark.parametrize("latency", [0.0, 5.0])
@pytest.mark.parametrize(("way", "links"), [(STRAIGHT, 5), (BROKER, 8)])
def test_plain_decoding_costs_its_links_passes_and_hops(
    machine: HostTimes, way: str, links: int, latency: float
) -> None:
    place = Linkage(way, latency)
    setup = Setup(*default_pair(), 4)
    assert place.links(4) == links

    def token(profile: Profile) -> float:
        return simulated([TEXT], PLAIN, profile, 4, SOURCE, History())

    passes = machine.given(place).passes
    assert passes == pytest.approx(0.016)
    assert token(machine.profile(place, setup)) == pytest.approx(
        links * latency / 1e3 + passes + 5 * 0.0005, rel=1e-4
    )
    assert token(machine.bare_profile(place, setup)) == pytest.approx(
        links * latency / 1e3 + 0.012, rel=1e-4
    )


# ---- the tables ----------------------------------------------------------------------------------


def times(real: float, emulated: float, simulated: float) -> Decoded:
    return Decoded(
        {PLAIN: real, "auto": real / 2},
        {PLAIN: emulated, "auto": emulated / 2},
        {PLAIN: simulated, "auto": simulated / 2},
        {"auto"},
        passes=0.01,
        charged=0.03,
    )


def cells(lines: Iterator[str]) -> list[list[str]]:
    """The cells of a table's rows, all with the head's number of cells."""
    found = list(lines)
    assert len({line.count("|") for line in found}) == 1
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2:]]


def test_the_tables_say_which_places_are_within_the_bar() -> None:
    near, far = Linkage(STRAIGHT, 0.0), Linkage(BROKER, 5.0)
    found = {near: times(0.0102, 0.0098, 0.01), far: times(0.053, 0.05, 0.05)}
    rows = cells(plain_table(found))
    assert rows[0][2:] == ["10.20", "9.80", "10.00", "0.980", "1.020", "4.1%", "yes", "30.00"]
    assert rows[1][7:9] == ["6.0%", "no"]
    assert "in 1 of 2 places; the largest deviation is 6.0%" in verdict(found)
    marked = cells(strategies_table(found, ["auto"]))
    assert marked[0] == [STRAIGHT, "0", "auto", "5.10", "4.90 (refused)", "5.00", "1.02"]


def test_the_parts_of_a_token_add_up() -> None:
    place = Linkage(BROKER, 5.0)
    found = {place: times(0.06, 0.06, 0.06)}
    (row,) = cells(parts_table(found, {place: Given(0.005, 0.001, 0.012)}, 4))
    assert row[2:] == ["40.00", "10.00", "12.00", "10.00", "5.00"]


def test_an_unknown_way_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "check", lambda: None)
    monkeypatch.setattr(sys, "argv", ["hosts", "--busy", "--ways", "pigeon"])
    with pytest.raises(SystemExit) as ended:
        hosts.main()
    assert str(ended.value) == "hosts: --ways 'pigeon'; expected some of straight, broker"


@needs_hosts
@pytest.mark.heavy
def test_real_hosts_are_beside_emulated_and_simulated_ones() -> None:
    words = ("--busy", "--latencies", "25", "--ways", "straight", "--strategies", "flowspec")
    head, _, row, *_ = printed(
        *("ops.bench.hosts", *words, "--stages", "2"),
        *("--tokens", "6", "--count", "1", "--repeats", "1"),
    )
    plain = dict(zip(head, row, strict=True))
    assert all(float(plain[which]) > 3 * 25 for which in ("real", "emulated", "simulated"))
