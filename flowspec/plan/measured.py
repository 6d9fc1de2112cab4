"""What to ask a box to measure, and its box for the plan from what it answers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec.model.drafters.kinds import BLOCK, EAGLE, NGRAM
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import Precision
from flowspec.model.weights.shapes import ModelShapes, few_layers, shapes_of
from flowspec.plan.boxes import TimedBox
from flowspec.plan.drafts import PlannedDrafts
from flowspec.plan.estimate import NGRAM_SECONDS, drafter_precision, rising
from flowspec.plan.needs import layer_bytes
from flowspec.rehearse.devices.profile import Times

#: Row counts that are measured, and passes of each.
MEASURED_ROWS = (1, 16, 64)
REPEATS = 9


def request_for(
    directory: ModelDirectory, precision: Precision, drafts: PlannedDrafts
) -> dict[str, Any]:
    """The request for a plan of the model in ``directory``; it has an id of its own."""
    own = drafter_precision(precision)
    asked = {}
    for name, shapes in drafts.shapes.items():
        sizes = [layer_bytes(layer, own) for layer in shapes.layers]
        asked[name] = {
            "config": dict(drafts.configs[name]),
            "layers": sum(sizes) / _layer_size(drafts.configs[name], own),
            "target_head": name in (EAGLE.name, BLOCK.name),
        }
    return {
        "id": secrets.token_hex(8),
        "target": dict(directory.config),
        "drafts": asked,
        "lookup": drafts.lookup,
        "dtype": precision.name,
        "draft_dtype": own.name,
        "rows": MEASURED_ROWS,
        "repeats": REPEATS,
    }


def measured_box(
    name: str,
    memory: float,
    seconds: Mapping[str, Mapping[str, float]],
    request: Mapping[str, Any],
    shapes: ModelShapes,
    precision: Precision,
    *,
    device: str = "auto",
    shared: float = 2.0,
) -> TimedBox:
    """The box that measured ``seconds`` for ``request``.

    Layers that differ from the one that was timed take longer in proportion to their bytes.
    """
    timed = _layer_size(request["target"], precision)
    known: dict[int, Times] = {}
    layers = []
    for layer in shapes.layers:
        size = layer_bytes(layer, precision)
        if size not in known:
            known[size] = _times(seconds["layer"], size / timed)
        layers.append(known[size])
    drafters = {name: _times(seconds[name]) for name in request["drafts"]}
    if request["lookup"]:
        drafters[NGRAM] = Times(((1, NGRAM_SECONDS),))
    return TimedBox(
        name,
        memory,
        tuple(layers),
        _times(seconds["embedding"]),
        _times(seconds["head"]),
        drafters,
        shared,
        device,
        _times(seconds["each"]),
    )


def _layer_size(config: Mapping[str, Any], precision: Precision) -> int:
    """Bytes of the layer that is timed for ``config``."""
    (layer,) = shapes_of(ModelDirectory(Path("config"), few_layers(config, 1))).layers
    return layer_bytes(layer, precision)


def _times(seconds: Mapping[str, float], factor: float = 1.0) -> Times:
    return rising(sorted((int(rows), factor * one) for rows, one in seconds.items()))
