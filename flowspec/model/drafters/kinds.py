"""The kinds of drafters that are folders: one entry each, with all in which the kinds differ.

Needs no torch but to load one. N-grams have no folder (``sources``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowspec.errors import ModelError
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.block_layout import (
    LM_HEAD,
    block_taps,
    check_block_drafter,
    is_block_drafter,
)
from flowspec.model.drafters.eagle3_layout import is_eagle3, read_layout
from flowspec.model.drafters.eagle_layout import check_eagle, is_eagle
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory, check_pair, default_pair

if TYPE_CHECKING:
    from flowspec.model.layers.placing import Placing

#: The drafter that looks up n-grams of the text: its name, and that of its kind.
NGRAM = "ngram"

Load = Callable[[ModelDirectory, ModelDirectory, "Placing"], DraftExecutor]


def default_draft(target: str | None) -> str:
    """The draft if none is named: the packaged one for the packaged target, else n-grams."""
    packaged, own = default_pair()
    return own if target in (None, "target", packaged) else NGRAM


@dataclass(frozen=True, slots=True)
class FolderKind:
    """A kind of drafter; all functions are given its folder, some the target's as well.

    ``name``: in profiles and plans. ``shown``: in messages. ``found``: whether a folder has one.
    ``architecture``: what a config without weights is known by. ``check``: ModelError unless it
    fits the target. ``load``: reads the weights. ``reads_target``: whether it drafts from the
    target's hidden rows. ``taps``: what it reads inside the target; None: its last rows.
    ``lm_head``: whether it uses the target's.
    """

    name: str
    shown: str
    found: Callable[[ModelDirectory], bool]
    architecture: str
    check: Callable[[ModelDirectory, ModelDirectory], object]
    load: Load
    reads_target: bool = True
    taps: Callable[[ModelDirectory, ModelDirectory], Taps | None] = lambda own, target: None
    lm_head: Callable[[ModelDirectory], bool] = lambda own: False


def _load_block_drafter(
    own: ModelDirectory, target: ModelDirectory, placing: Placing
) -> DraftExecutor:
    from flowspec.model.drafters.block_drafter import load_block_drafter

    return load_block_drafter(own, target, placing)


def _load_eagle3(own: ModelDirectory, target: ModelDirectory, placing: Placing) -> DraftExecutor:
    from flowspec.model.drafters.eagle3 import load_eagle3

    return load_eagle3(own, target, placing)


def _load_eagle(own: ModelDirectory, target: ModelDirectory, placing: Placing) -> DraftExecutor:
    from flowspec.model.drafters.eagle import load_head

    return load_head(own, target, placing)


def _load_language_model(
    own: ModelDirectory, target: ModelDirectory, placing: Placing
) -> DraftExecutor:
    from flowspec.model.drafters.language_model import load_drafter

    check_pair(target, own)
    return load_drafter(own, placing, target.vocabulary)


BLOCK = FolderKind(
    "block",
    "a block drafter",
    is_block_drafter,
    "dflash",
    check_block_drafter,
    _load_block_drafter,
    taps=block_taps,
    lm_head=lambda own: LM_HEAD not in own.weight_files,
)
EAGLE3 = FolderKind(
    "head",
    "an EAGLE-3 head",
    is_eagle3,
    "eagle3",
    read_layout,
    _load_eagle3,
    taps=lambda own, target: read_layout(own, target).taps,
)
EAGLE = FolderKind(
    "head",
    "an EAGLE head",
    is_eagle,
    "eagle",
    check_eagle,
    _load_eagle,
    lm_head=lambda own: True,
)
LANGUAGE_MODEL = FolderKind(
    "slm",
    "a language model",
    lambda directory: True,
    "",
    lambda own, target: check_pair(target, own),
    _load_language_model,
    reads_target=False,
)
#: The first that is found is it.
KINDS = (BLOCK, EAGLE3, EAGLE, LANGUAGE_MODEL)


def kind_of(directory: ModelDirectory) -> FolderKind:
    """The kind of drafter in ``directory``; ModelError as from ``ModelDirectory.weight_files``."""
    return next(kind for kind in KINDS if kind.found(directory))


def planned_kind(directory: ModelDirectory) -> FolderKind:
    """``kind_of``, or of a config without weights the kind by its architecture."""
    try:
        return kind_of(directory)
    except ModelError:
        names = " ".join(map(str, directory.config.get("architectures") or ())).lower()
        return next(kind for kind in KINDS if kind.architecture in names)
