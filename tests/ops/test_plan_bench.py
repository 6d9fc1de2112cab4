"""The plan's benchmark on one small cluster: what is predicted is what real workers take.

Software is left out on both sides, since its time depends on what else this machine does.
"""

from __future__ import annotations

import itertools

import pytest

from flowspec.plan.boxes import parse_boxes
from flowspec.plan.predict import PLAIN, Predictor
from flowspec.rehearse.devices.profile import LinkShape
from ops.bench import plan
from ops.bench.plan import RandomCluster, emulated, found_layouts, models, planned, random_clusters


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(["What is the sea?"], plan.SOURCE, tokens=10)


@pytest.mark.heavy
def test_the_emulated_run_takes_what_the_plan_predicts(predictor: Predictor) -> None:
    cluster = RandomCluster(
        parse_boxes("slow:16GiB@500GB/s,fast:2x12GiB@1500GB/s"), LinkShape(0.002, 125e6)
    )
    target, drafts = models()
    found = planned(cluster, found_layouts(cluster, target, drafts), target.hidden, predictor)
    chosen = found.chosen
    assert chosen.seconds[plan.STRATEGY] < chosen.seconds[PLAIN]
    ran = emulated(
        chosen.layout,
        found.rows,
        (PLAIN, plan.STRATEGY),
        predictor.texts,
        stretch=8.0,
        free=True,
    )
    expected = {
        strategy: predictor.token_seconds(found.rows.profile(chosen.layout, strategy), strategy)
        for strategy in (PLAIN, plan.STRATEGY)
    }
    assert ran.seconds[PLAIN] == pytest.approx(expected[PLAIN], rel=0.1)
    if not ran.mark:  # this machine kept up
        assert ran.seconds[plan.STRATEGY] == pytest.approx(expected[plan.STRATEGY], rel=0.1)
    assert expected[PLAIN] < chosen.seconds[PLAIN] < 2 * expected[PLAIN]
    assert plan.row(found, ran).startswith("| 16 GiB 500 GB/s, 12 GiB 1500 GB/s")


@pytest.mark.heavy
def test_fewer_boxes_are_chosen_where_they_are_faster(predictor: Predictor) -> None:
    """Four slow boxes only add hops to the two fast ones."""
    cluster = RandomCluster(
        parse_boxes("slow:4x4GiB@20GB/s,fast:2x24GiB@200GB/s"), LinkShape(0.01, 125e6)
    )
    target, drafts = models()
    found = planned(cluster, found_layouts(cluster, target, drafts), target.hidden, predictor)
    names = {stage.box.name for stage in found.chosen.layout.stages}
    assert names | {found.chosen.layout.draft.name} <= {"fast-1", "fast-2"}
    assert max(found.best) == 6
    most = found.best[6].seconds[plan.STRATEGY]
    assert found.chosen.seconds[plan.STRATEGY] < most


def test_a_seed_gives_the_same_clusters() -> None:
    one, other = (list(itertools.islice(random_clusters(1), 5)) for _ in range(2))
    assert one == other
    assert one != list(itertools.islice(random_clusters(2), 5))
    assert all(3 <= len(cluster.boxes) <= 6 for cluster in one)
