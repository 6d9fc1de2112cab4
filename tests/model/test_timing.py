"""One layer with random weights is timed as a stage has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowspec.model.stage import load_stage
from flowspec.model.timing import time_layer, time_request
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.shapes import few_layers, read_config, shapes_of

TARGET, DRAFT = (open_directory(name) for name in default_pair())


def test_more_rows_and_more_weights_take_longer() -> None:
    small = time_layer(DRAFT.config, (1, 64), 5)
    wide = time_layer({**DRAFT.config, "intermediate_size": 8192}, (1, 64), 5)
    for seconds in (small.layer, small.head):
        assert 0 < seconds[1] < seconds[64]
    assert wide.layer[64] > 1.5 * small.layer[64]
    assert small.embedding[1] > 0


def test_a_request_times_a_whole_drafter() -> None:
    draft = {"config": dict(DRAFT.config), "layers": 100.0, "target_head": False}
    request = {
        "target": dict(TARGET.config),
        "drafts": {"slm": draft},
        "dtype": "float32",
        "draft_dtype": "float32",
        "rows": (1,),
        "repeats": 5,
    }
    found = time_request(request)
    assert found.keys() == {"layer", "each", "head", "embedding", "slm"}
    assert found["slm"][1] > 10 * found["layer"][1]


@pytest.mark.parametrize("entries", [{}, {"layer_types": ["full_attention"] * 12}])
def test_the_timed_layer_is_the_last_one(tmp_path: Path, entries: dict[str, object]) -> None:
    cut = few_layers({**TARGET.config, **entries}, 1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(cut))
    shapes = shapes_of(read_config(str(file)))
    assert shapes.layers == shapes_of(TARGET).layers[-1:]
    assert not shapes.tied


def test_the_seconds_of_a_stages_model_are_told_on_a_processor_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU computes while the thread goes on."""
    stage = load_stage(TARGET, range(1))
    assert stage.clock is not None
    assert stage.clock() == stage.model_seconds
    monkeypatch.setattr(stage.block, "device", torch.device("meta"))
    assert stage.clock is None
