"""Bytes that a stage or a drafter needs, from the model's shapes alone.

Matrices of layers have the plan's precision, and so has the LM head except in the quantised ones,
where it has ``HEAD``. Norms, biases and the embedding have the rows' type, and so have KV rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from flowspec.core.drafting.drafting import DRAFT_TREE_ROWS
from flowspec.core.run.limits import TREE_ROWS, default_kept_rows
from flowspec.model.weights.precision import PRECISIONS, Precision
from flowspec.model.weights.shapes import LayerShapes, ModelShapes

#: Precision of the LM head of a quantised model.
HEAD = "int8-block"
#: A worker process before it has loaded anything: interpreter, libraries, buffers
#: (ops/bench/results/memory.md: 343 MiB).
BARE_BYTES = 384 << 20
#: Peak over the size of the weights (ops/bench/results/memory.md: 1.07 to 1.09).
LOADED = 1.1


def head_precision(precision: Precision) -> Precision:
    """The precision of the LM head of a model in ``precision``."""
    return PRECISIONS[HEAD] if precision.quantised else precision


def layer_bytes(layer: LayerShapes, precision: Precision) -> int:
    """Bytes of one layer's weights."""
    matrices = sum(precision.weight_bytes(shape) for shape in layer.matrices)
    return matrices + layer.values * precision.row_bytes("cpu")


def head_bytes(shapes: ModelShapes, precision: Precision) -> int:
    """Bytes of the LM head and the norm before it."""
    head = head_precision(precision).weight_bytes(shapes.embedding)
    return head + shapes.hidden * precision.row_bytes("cpu")


@dataclass(frozen=True)
class StageNeeds:
    """What stages of a model need for ``jobs`` texts of up to ``context`` tokens at a time."""

    shapes: ModelShapes
    precision: Precision
    context: int
    jobs: int = 1

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        """Bytes of the layers before each layer, and of all."""
        sizes = (layer_bytes(layer, self.precision) for layer in self.shapes.layers)
        return tuple(accumulate(sizes, initial=0))

    def weights(self, layers: range) -> int:
        """Bytes of the weights of the stage with ``layers``."""
        first = layers.start == 0
        last = layers.stop == len(self.shapes.layers)
        found = self._sums[layers.stop] - self._sums[layers.start]
        embedding = math.prod(self.shapes.embedding) * self.precision.row_bytes("cpu")
        found += embedding * first
        if last:  # a tied head too has its own copy, in its kernel's layout
            found += head_bytes(self.shapes, self.precision)
        return found

    def rows(self, layers: range) -> int:
        """Bytes of its KV rows: the context and the largest token tree, for every job.

        And of the rows that are kept for other jobs.
        """
        rows = (self.context + TREE_ROWS) * self.jobs + default_kept_rows(self.context)
        return self._rows(layers, rows)

    def _rows(self, layers: range, count: int) -> int:
        return len(layers) * count * self.shapes.kv_values * self.precision.row_bytes("cpu")

    def stage(self, layers: range, rows: int | None = None) -> int:
        """Bytes of the whole worker process, with its working margin.

        ``rows``: the most KV rows that it holds; None: as ``rows`` counts them.
        """
        held = self.rows(layers) if rows is None else self._rows(layers, rows)
        return BARE_BYTES + math.ceil(LOADED * self.weights(layers)) + held


def drafter_bytes(shapes: ModelShapes, precision: Precision, context: int) -> int:
    """Bytes of a small language model as a drafter, beyond those of its bare process."""
    whole = range(len(shapes.layers))
    needs = StageNeeds(shapes, precision, context)
    rows = context + DRAFT_TREE_ROWS + default_kept_rows(context)
    row = len(whole) * shapes.kv_values * precision.row_bytes("cpu")
    return math.ceil(LOADED * needs.weights(whole)) + rows * row
