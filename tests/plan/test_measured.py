"""Boxes from measurements: the timed layer's seconds, scaled to layers that differ."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.shapes import LayerShapes, shapes_of
from flowspec.plan.drafts import planned_drafts
from flowspec.plan.estimate import NGRAM_SECONDS
from flowspec.plan.measured import measured_box, request_for
from flowspec.rehearse.devices.profile import Times
from tests.model.eagle3_heads import Shape, save_eagle3

FLOAT = PRECISIONS["float32"]
TARGET = open_directory(default_pair()[0])
SHAPES = shapes_of(TARGET)
SECONDS = {
    "layer": {"1": 1.0, "16": 0.9, "64": 2.0},
    "each": {"1": 0.5},
    "head": {"1": 3.0},
    "embedding": {"1": 0.1},
    "slm": {"1": 4.0},
}


def request(draft: str) -> dict[str, Any]:
    return request_for(TARGET, FLOAT, planned_drafts(draft, SHAPES))


def test_every_request_has_an_id_of_its_own() -> None:
    assert request("ngram")["id"] != request("ngram")["id"]


def test_drafters_are_asked_for_by_their_configs() -> None:
    asked = request("draft:head+ngram")
    assert asked["lookup"]
    assert asked["drafts"]["slm"]["layers"] == pytest.approx(2)
    assert not asked["drafts"]["slm"]["target_head"]
    assert 1 < asked["drafts"]["head"]["layers"] < 2, "a layer, and the matrix before it"
    assert asked["drafts"]["head"]["target_head"]


def test_an_eagle3_head_reads_token_and_feature_side_by_side(tmp_path: Path) -> None:
    """Its layer's queries, keys and values are twice as wide, and no matrix joins them before."""
    head = save_eagle3(tmp_path, TARGET, Shape(hidden=192, layers=()))
    for weights in (True, False):
        if not weights:
            (tmp_path / "model.safetensors").unlink()
        (layer,) = planned_drafts(str(head.path), SHAPES).shapes["head"].layers
        assert layer.matrices[:4] == ((64, 384), (32, 384), (32, 384), (192, 64))


def test_a_box_has_what_was_measured() -> None:
    box = measured_box("a", 7.0, SECONDS, request("draft"), SHAPES, FLOAT, device="cpu", shared=1.0)
    assert (box.name, box.memory, box.device, box.shared) == ("a", 7.0, "cpu", 1.0)
    assert box.layers == (Times(((1, 1.0), (16, 1.0), (64, 2.0))),) * 12, "times never fall"
    assert box.head == Times(((1, 3.0),))
    assert box.each == Times(((1, 0.5),))
    assert box.drafters == {"slm": Times(((1, 4.0),))}


def test_a_layer_of_twice_the_bytes_takes_twice_as_long() -> None:
    first = SHAPES.layers[0]
    doubled = LayerShapes(first.matrices * 2, first.values * 2)
    mixed = replace(SHAPES, layers=(doubled, *SHAPES.layers[1:]))
    box = measured_box("a", 7.0, SECONDS, request("ngram"), mixed, FLOAT)
    assert box.layers[0].at(64) == pytest.approx(2 * box.layers[1].at(64))
    assert box.drafters == {"ngram": Times(((1, NGRAM_SECONDS),))}
