"""A cluster file is read as it was written, and anything else is refused in one line."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ConfigError
from flowspec.model.weights.precision import DTYPES
from flowspec.plan.cluster_file import (
    ClusterFile,
    ClusterStage,
    check_ranges,
    parse_cluster,
    parse_ranges,
    ranges_text,
    read_cluster,
    write_cluster,
)
from flowspec.rehearse.devices.profile import LinkShape

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
DEVICES = st.sampled_from(["auto", "cpu", "cuda", "cuda:1"])


@st.composite
def ranges(draw: st.DrawFn) -> tuple[range, ...]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    bounds = itertools.accumulate(lengths, initial=0)
    return tuple(range(*pair) for pair in itertools.pairwise(bounds))


@st.composite
def clusters(draw: st.DrawFn) -> ClusterFile:
    stages = tuple(
        ClusterStage(draw(TEXT), block, draw(st.sampled_from(DTYPES)), draw(DEVICES))
        for block in draw(ranges())
    )
    link = LinkShape(draw(st.integers(0, 10**6)) / 1e6, draw(st.integers(1, 10**9)) * 1.0)
    return ClusterFile(
        draw(TEXT), draw(TEXT), draw(TEXT), draw(st.integers(1, 10**6)), stages, link
    )


@given(clusters())
def test_what_is_written_is_read(cluster: ClusterFile) -> None:
    found = parse_cluster(write_cluster(cluster, ["a remark"]))
    assert replace(found, link=cluster.link) == cluster
    assert found.link.latency == pytest.approx(cluster.link.latency)
    assert found.link.bandwidth == pytest.approx(cluster.link.bandwidth)


@given(ranges())
def test_ranges_survive_the_record(blocks: tuple[range, ...]) -> None:
    assert parse_ranges(ranges_text(blocks)) == blocks
    check_ranges(blocks, blocks[-1].stop)
    with pytest.raises(ConfigError, match=r"expected all \d+ layers of the model"):
        check_ranges(blocks, blocks[-1].stop + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-3 4-6", "follow each other from 0 on"),
        ("1-3", "follow each other from 0 on"),
        ("0-3 3-3", "each with a layer or more"),
        ("0-3,3-6", "expected ranges like '0-5 5-12'"),
        ("", "no stage"),
    ],
)
def test_other_ranges_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_ranges(text)


GOOD = write_cluster(
    ClusterFile("m", "ngram", "a", 64, (ClusterStage("a", range(3)),), LinkShape(0.001, 1e6))
)


def test_precisions_and_devices_may_be_left_out() -> None:
    bare = "\n".join(line for line in GOOD.splitlines() if "auto" not in line)
    assert bare.count("\n") == GOOD.count("\n") - 4
    assert parse_cluster(bare) == parse_cluster(GOOD)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("context = 64", "context = 0", "context is 0; expected 1 or more"),
        ("context = 64", "context = true", "context is True; expected a whole number"),
        ("context = 64", "", "context is missing"),
        ('model = "m"', "model = 3", "model is 3; expected text"),
        ('model = "m"', 'model = "m"\nstages = 3', "unknown entry 'stages'"),
        ("mbit", "gbit", "link.unknown entry 'gbit'"),
        ("latency_ms = 1.0", "latency_ms = -1", "expected a latency from 0"),
        ('layers = "0-3"', 'layers = "0-3 3-4"', "stage 1: layers is '0-3 3-4'"),
        ('layers = "0-3"', 'layers = "1-3"', "follow each other from 0 on"),
        ('dtype = "auto"', 'dtype = "int7"', "stage 1: dtype 'int7' is unknown"),
        ('device = "auto"', 'device = "tpu"', "stage 1: device 'tpu' is unknown"),
        ("[[stage]]", "[stage]", "stage is .*; expected tables"),
        ("[[stage]]", "[[stage", "it is no TOML"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    file = tmp_path / "plan.toml"
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as raised:
        read_cluster(file)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_cluster(tmp_path / "none.toml")
