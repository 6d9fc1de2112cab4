"""Predictions: plain decoding is a sum, more hits are faster, and the fastest layout is chosen."""

from __future__ import annotations

import pytest

from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.shapes import LayerShapes, ModelShapes
from flowspec.plan.boxes import DescribedBox, TimedBox
from flowspec.plan.estimate import timed
from flowspec.plan.layout import layouts
from flowspec.plan.needs import StageNeeds
from flowspec.plan.predict import (
    PLAIN,
    SOFTWARE_SECONDS,
    Predicted,
    Predictor,
    TargetRows,
    best_by_boxes,
    fastest,
)
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times

HALF = PRECISIONS["bfloat16"]
SHAPES = ModelShapes(
    (LayerShapes(((4096, 4096), (11008, 4096), (4096, 11008)), 8192),) * 8,
    (32000, 4096),
    False,
    4096,
    2048,
    4096,
)
LINK = LinkShape(0.002, 125e6)
ROWS = TargetRows(4096, 2, LINK)
PROMPTS = ["What is the sea?"]


def box(name: str, memory: float, speed: float) -> TimedBox:
    drafters = {"slm": Times(((1, 0.2 / speed),))}
    return timed(DescribedBox(name, memory * 2.0**30, speed * 1e9), SHAPES, HALF, drafters)


def best(boxes: list[TimedBox], predictor: Predictor, strategy: str) -> dict[int, Predicted]:
    found = layouts(boxes, StageNeeds(SHAPES, HALF, 1024), "slm", 0)
    return best_by_boxes(found, ROWS, predictor, strategy)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(PROMPTS, "slm", tokens=12)


def test_plain_decoding_is_a_pass_through_every_stage_and_its_hops(predictor: Predictor) -> None:
    boxes = [box("a", 4, 50), box("b", 4, 25)]
    for found in best(boxes, predictor, PLAIN).values():
        layout = found.layout
        profile: Profile = ROWS.profile(layout, PLAIN)
        stages = len(layout.stages)
        passes = sum(profile.stage_seconds(stage, stages, 1) for stage in range(1, stages + 1))
        transfers = (stages - 1) * 4096 * 2 / LINK.bandwidth
        software = (stages + 1) * SOFTWARE_SECONDS
        expected = passes + software + (stages + 1) * LINK.latency + transfers
        assert found.seconds[PLAIN] == pytest.approx(expected, rel=1e-3)


def test_the_fastest_of_all_numbers_of_boxes_is_chosen(predictor: Predictor) -> None:
    boxes = [box("fast", 16, 200), box("slow", 4, 5)]
    found = best(boxes, predictor, PLAIN)
    assert set(found) == {1, 2}
    chosen = fastest(found, PLAIN)
    assert chosen is found[1]
    assert [stage.box.name for stage in chosen.layout.stages] == ["fast"]


def test_a_tie_goes_to_fewer_boxes(predictor: Predictor) -> None:
    (one,) = best([box("a", 16, 50)], predictor, PLAIN).values()
    two = Predicted(best([box("a", 3, 50)] * 1 + [box("b", 3, 50)], predictor, PLAIN)[2].layout, {})
    same = Predicted(two.layout, one.seconds)
    assert fastest({2: same, 1: one}, PLAIN) is one


def test_more_hits_are_faster() -> None:
    boxes = [box("a", 4, 50), box("b", 4, 50)]
    seconds = []
    for acceptance in (0.0, 0.5, 1.0):
        hits = Predictor(PROMPTS, "slm", acceptance, tokens=16)
        seconds.append(fastest(best(boxes, hits, "auto"), "auto").seconds["auto"])
    assert seconds[0] > seconds[1] > seconds[2]
