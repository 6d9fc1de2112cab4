"""The drafters of a plan from their configurations: their names in a profile, bytes and passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.emulation.profile import Times, source_parts
from flowspec.errors import ModelError
from flowspec.model.directory import ModelDirectory
from flowspec.model.head_layout import is_head
from flowspec.model.precision import Precision
from flowspec.model.shapes import LayerShapes, ModelShapes, read_config, shapes_of
from flowspec.model.sources import NGRAM, choices, source_names
from flowspec.planning.boxes import DescribedBox
from flowspec.planning.estimate import NGRAM_SECONDS, drafter_precision, drafter_times
from flowspec.planning.needs import drafter_bytes

SLM, HEAD = "slm", "head"


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
        kinds[name] = HEAD if _is_head(directory) else SLM
        own = shapes_of(directory)
        configs[kinds[name]] = directory.config
        shapes[kinds[name]] = _head_shapes(own, target) if kinds[name] == HEAD else own
    source = ":".join(
        "+".join(kinds[name] for name in source_names(choice)) for choice in choices(draft)
    )
    source_parts(source)
    return PlannedDrafts(source, shapes, configs)


def _is_head(directory: ModelDirectory) -> bool:
    """As ``is_head``, but by the config's architecture if there are no weights."""
    try:
        return is_head(directory)
    except ModelError:
        return any(
            "eagle" in str(name).lower() for name in directory.config.get("architectures") or ()
        )


def _head_shapes(own: ModelShapes, target: ModelShapes) -> ModelShapes:
    """An EAGLE head: its layers, the matrix that joins token and feature, the target's LM head."""
    joining = (target.hidden, 2 * target.hidden)
    first, *rest = own.layers
    layers = (LayerShapes((joining, *first.matrices), first.values), *rest)
    return replace(own, layers=layers, embedding=target.embedding, tied=target.tied)
