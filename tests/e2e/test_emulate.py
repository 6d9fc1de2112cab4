"""Real workers on emulated devices give the simulation's trace of the same profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, JobFailed
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.simulate import profile_costs, simulate
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices.profile import Times
from flowspec.rehearse.devices.profiles import load
from ops.bench.emulate import EmulatedCluster

pytestmark = pytest.mark.live

#: Devices ten times as fast, links unchanged.
PROFILE = replace(
    load("jetson-7b"),
    layer=Times(((1, 0.81e-3),)),
    head=Times(((1, 0.5e-3),)),
    drafters={"slm": Times(((1, 4.4e-3),))},
)
STRATEGIES = ("flowspec", "pipedec", "chain", "autoregressive")


def test_equal_costs_give_the_trace_of_the_simulation() -> None:
    target, draft = map(open_directory, default_pair())
    (text,) = texts(["What is the sea?"], [Sampling()], 10, target)
    costs = profile_costs(PROFILE, 2, "slm")
    whole = []
    with EmulatedCluster(PROFILE, 2, stretch=10.0, free_software=True) as cluster:
        for strategy in STRATEGIES:
            drafter = load_sources(str(draft.path), target)
            expected = simulate(text, strategy, 2, target, drafter, costs).committed_at
            done = cluster.run_all([text], strategy)
            assert not done.different
            if done.counts.overtaken:
                continue  # this machine was too busy; otherwise the trace is exact
            whole.append(strategy)
            found = done.runs[0].committed_at
            assert [count for _, count in found] == [count for _, count in expected]
            assert [at for at, _ in found] == pytest.approx([at for at, _ in expected], abs=1e-6)
        with pytest.raises(JobFailed, match="the model's vocabulary ends at"):
            cluster.run(Text((10**6,), (1,), Sampling()), "flowspec")
    assert "autoregressive" in whole, "with one segment on its way nothing can be overtaken"


def test_an_unknown_draft_source_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no drafter 'crystal-ball'"):
        EmulatedCluster(PROFILE, 2, source="crystal-ball")
