"""The drafters of a plan from their configurations: their names in a profile, bytes and passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.model.drafters.kinds import BLOCK, EAGLE, EAGLE3, NGRAM, planned_kind
from flowspec.model.drafters.sources import choices, source_names
from flowspec.model.weights.precision import Precision
from flowspec.model.weights.shapes import LayerShapes, ModelShapes, read_config, shapes_of
from flowspec.plan.boxes import DescribedBox
from flowspec.plan.estimate import NGRAM_SECONDS, drafter_precision, drafter_times
from flowspec.plan.needs import drafter_bytes
from flowspec.rehearse.devices.profile import Times, source_parts


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """``source``: the draft in a profile's names. ``shapes``: of its models, by these names.

    ``configs``: of the same models.
    """

    source: str
    shapes: Mapping[str, ModelShapes]
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def lookup(self) -> bool:
        """Whether one of the drafters looks up n-grams of the text."""
        return any(NGRAM in names for names in source_parts(self.source))

    def size(self, precision: Precision, context: int) -> int:
        """Bytes of all drafters for a target in ``precision``."""
        own = drafter_precision(precision)
        return sum(drafter_bytes(shapes, own, context) for shapes in self.shapes.values())

    def times(self, box: DescribedBox, precision: Precision) -> dict[str, Times]:
        """Estimated passes on ``box``, by the names in a profile."""
        own = drafter_precision(precision)
        found = {name: drafter_times(box, one, own) for name, one in self.shapes.items()}
        if self.lookup:
            found[NGRAM] = Times(((1, NGRAM_SECONDS),))
        return found


def planned_drafts(draft: str, target: ModelShapes) -> PlannedDrafts:
    """The drafters in ``draft`` for ``target``; nothing but their configurations is read.

    ConfigError for two drafters of one kind in a choice, since a profile has one of each.
    """
    shapes: dict[str, ModelShapes] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    kinds: dict[str, str] = {NGRAM: NGRAM}
    for name in source_names(draft):
        if name == NGRAM:
            continue
        directory = read_config(name)
        kind = planned_kind(directory)
        kinds[name] = kind.name
        own = shapes_of(directory)
        configs[kind.name] = directory.config
        if kind in (EAGLE, EAGLE3):
            own = _head_shapes(own, target, wide=kind is EAGLE3)
        elif kind is BLOCK:  # the stages have its fc
            own = replace(own, embedding=target.embedding, tied=target.tied)
        shapes[kind.name] = own
    source = ":".join(
        "+".join(kinds[name] for name in source_names(choice)) for choice in choices(draft)
    )
    source_parts(source)
    return PlannedDrafts(source, shapes, configs)


def _head_shapes(own: ModelShapes, target: ModelShapes, *, wide: bool) -> ModelShapes:
    """An EAGLE head: its layers, what joins token and feature, an LM head like the target's.

    ``wide``: queries, keys and values read both side by side (EAGLE-3); else one matrix joins them.
    """
    first, *rest = own.layers
    if wide:
        doubled = [(rows, 2 * columns) for rows, columns in first.matrices[:3]]
        matrices = (*doubled, *first.matrices[3:])
    else:
        matrices = ((target.hidden, 2 * target.hidden), *first.matrices)
    layers = (LayerShapes(matrices, first.values), *rest)
    return replace(own, layers=layers, embedding=target.embedding, tied=target.tied)
