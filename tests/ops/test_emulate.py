"""Decisions of an emulated run: the stretch of time, and whether the run counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ClusterError, ConfigError
from flowspec.model.weights.directory import default_pair
from flowspec.rehearse.devices.profiles import load
from ops.bench.emulate import (
    BUSY_SHARE,
    OVERTAKEN_SHARE,
    Counts,
    EmulatedCluster,
    stretch_for,
)

counts = st.builds(
    Counts,
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.just(0.0),
    st.just(0.0),
)


@given(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4), st.integers(1, 64))
def test_the_stretch_leaves_the_machine_its_share_and_is_no_larger_than_it_must(
    cpu: float, nominal: float, cores: int
) -> None:
    stretch = stretch_for(cpu, nominal, cores)
    assert stretch >= 1
    assert cpu / (nominal * stretch * cores) <= BUSY_SHARE * (1 + 1e-9)
    assert stretch == 1 or cpu / (nominal * (stretch - 0.11) * cores) > BUSY_SHARE


@given(counts)
def test_a_run_is_refused_in_one_line_where_too_much_was_overtaken(found: Counts) -> None:
    if found.overtaken <= OVERTAKEN_SHARE * found.inputs:
        found.check(2.0)
        return
    with pytest.raises(ClusterError, match="use a stretch above 2, or a machine") as raised:
        found.check(2.0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("draft", "source"), [("draft:head", "slm"), ("draft", "slm:head"), ("draft:head", "")]
)
def test_the_drafters_and_their_times_are_as_many(draft: str, source: str) -> None:
    with pytest.raises(ConfigError, match=r"drafters to choose from|empty name"):
        EmulatedCluster(load("jetson-7b"), 4, models=(default_pair()[0], draft), source=source)


@given(counts, counts)
def test_counts_of_a_run_are_what_was_added(before: Counts, added: Counts) -> None:
    after = Counts(
        before.inputs + added.inputs,
        before.late + added.late,
        before.overtaken + added.overtaken,
        0.0,
        0.0,
    )
    assert after - before == added
