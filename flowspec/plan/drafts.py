"""The drafters of a plan from their configurations: their names in a profile, bytes and passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.errors import ModelError
from flowspec.model.drafters.block_layout import is_block_drafter
from flowspec.model.drafters.eagle3_layout import is_eagle3
from flowspec.model.drafters.head_layout import is_head
from flowspec.model.drafters.sources import NGRAM, choices, source_names
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import Precision
from flowspec.model.weights.shapes import LayerShapes, ModelShapes, read_config, shapes_of
from flowspec.plan.boxes import DescribedBox
from flowspec.plan.estimate import NGRAM_SECONDS, drafter_precision, drafter_times
from flowspec.plan.needs import drafter_bytes
from flowspec.rehearse.devices.profile import Times, source_parts

SLM = "slm"
HEAD = "head"
BLOCK = "block"


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
        kinds[name] = _kind(directory)
        own = shapes_of(directory)
        configs[kinds[name]] = directory.config
        if kinds[name] == HEAD:
            wide = _holds(directory, is_eagle3, "eagle3")
            own = _head_shapes(own, target, wide=wide)
        elif kinds[name] == BLOCK:  # the stages have its fc
            own = replace(own, embedding=target.embedding, tied=target.tied)
        shapes[kinds[name]] = own
    source = ":".join(
        "+".join(kinds[name] for name in source_names(choice)) for choice in choices(draft)
    )
    source_parts(source)
    return PlannedDrafts(source, shapes, configs)


def _kind(directory: ModelDirectory) -> str:
    if is_block_drafter(directory):
        return BLOCK
    return HEAD if _holds(directory, is_head, "eagle") else SLM


def _holds(directory: ModelDirectory, test: Callable[[ModelDirectory], bool], named: str) -> bool:
    """``test`` of the directory, or whether its architecture is ``named`` if it has no weights."""
    try:
        return test(directory)
    except ModelError:
        return any(
            named in str(name).lower() for name in directory.config.get("architectures") or ()
        )


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
