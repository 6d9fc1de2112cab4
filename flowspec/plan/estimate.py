"""Pass times of a box that is only described: bytes over bandwidth, or arithmetic over compute.

The larger of the two: a pass reads all of its weights once, whatever its rows, and computes two
operations per weight and row. Of a layer's experts it reads those that some row uses, at random.
KV rows, norms and the software are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from flowspec.model.weights.precision import PRECISIONS, Precision
from flowspec.model.weights.shapes import ModelShapes, Shape
from flowspec.plan.boxes import DescribedBox, TimedBox
from flowspec.plan.needs import head_precision
from flowspec.rehearse.devices.profile import Times

#: Row counts of a table of pass times: a token, a segment, a large tree; and prefill.
ROWS = (1, 16, 64, 256)
#: A lookup in the text so far, on any box, seconds.
NGRAM_SECONDS = 1e-4
_LEAST = 1e-9  # a table's times are above 0


def timed(
    box: DescribedBox, shapes: ModelShapes, precision: Precision, drafters: Mapping[str, Times]
) -> TimedBox:
    """The pass times of ``shapes`` in ``precision`` on ``box``."""
    known: dict[tuple[Shape, ...], Times] = {}
    for layer in shapes.layers:
        if layer.matrices not in known:
            known[layer.matrices] = _passes(box, _costs(layer.matrices, shapes, precision))
    row = shapes.hidden * precision.row_bytes("cpu")
    head = _costs([shapes.embedding], shapes, head_precision(precision))
    return TimedBox(
        box.name,
        box.memory,
        tuple(known[layer.matrices] for layer in shapes.layers),
        _passes(box, lambda rows: (float(rows * row), 0.0)),
        _passes(box, head),
        drafters,
    )


def drafter_times(box: DescribedBox, shapes: ModelShapes, precision: Precision) -> Times:
    """A pass of a small language model on ``box``, LM head included."""
    matrices = [shape for layer in shapes.layers for shape in layer.matrices]
    return _passes(box, _costs([*matrices, shapes.embedding], shapes, precision))


def _costs(
    matrices: Sequence[Shape], shapes: ModelShapes, precision: Precision
) -> Callable[[int], tuple[float, float]]:
    """Bytes read and operations of a pass, by its rows."""

    def costs(rows: int) -> tuple[float, float]:
        size = operations = 0.0
        for shape in matrices:
            experts = shape[0] if len(shape) == 3 else 1
            share = shapes.experts_used / experts if experts > 1 else 1.0
            size += precision.weight_bytes(shape) * (1 - (1 - share) ** rows)
            operations += 2.0 * math.prod(shape) * share * rows
        return size, operations

    return costs


def _passes(box: DescribedBox, costs: Callable[[int], tuple[float, float]]) -> Times:
    points = []
    for rows in ROWS:
        size, operations = costs(rows)
        computing = operations / box.compute if box.compute else 0.0
        points.append((rows, max(_LEAST, size / box.bandwidth, computing)))
    return rising(points)


def rising(points: Iterable[tuple[int, float]]) -> Times:
    """A table of times; one below that of fewer rows is raised to it."""
    rows, seconds = zip(*points, strict=True)
    return Times(tuple(zip(rows, accumulate(seconds, max), strict=True)))


def drafter_precision(precision: Precision) -> Precision:
    """The precision of a small model that drafts for a target in ``precision``."""
    return PRECISIONS[precision.rows]
