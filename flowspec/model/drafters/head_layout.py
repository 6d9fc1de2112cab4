"""Telling heads and block drafters from language models by their directories. Needs no torch."""

from __future__ import annotations

from flowspec.errors import ModelError
from flowspec.model.drafters.block_layout import (
    LM_HEAD,
    block_taps,
    check_block_drafter,
    is_block_drafter,
)
from flowspec.model.drafters.eagle3_layout import is_eagle3, read_layout
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory

#: A tensor that every EAGLE head and block drafter has, and no language model.
_HEAD_TENSOR = "fc.weight"


def is_head(directory: ModelDirectory) -> bool:
    """Whether the directory holds an EAGLE head or a block drafter, instead of a language model."""
    return _HEAD_TENSOR in directory.weight_files


def head_name(directory: ModelDirectory) -> str:
    """What to call the head in ``directory``, with its article."""
    if is_block_drafter(directory):
        return "a block drafter"
    return "an EAGLE-3 head" if is_eagle3(directory) else "an EAGLE head"


def check_head(head: ModelDirectory, target: ModelDirectory) -> None:
    """ModelError unless ``head`` is a head or block drafter of the target's shape."""
    if not is_head(head):
        raise ModelError(f"{head.path} is no EAGLE head: it has no tensor {_HEAD_TENSOR}")
    if is_block_drafter(head):
        check_block_drafter(head, target)
        return
    if is_eagle3(head):
        read_layout(head, target)
        return
    if head.hidden_size != target.hidden_size:
        raise ModelError(
            f"the head in {head.path} has hidden size {head.hidden_size}, "
            f"the target {target.hidden_size}; a head serves only the target it was trained for"
        )


def head_taps(head: ModelDirectory, target: ModelDirectory) -> Taps | None:
    """What ``head`` reads inside ``target``; None: the target's last rows, which it returns."""
    if is_block_drafter(head):
        return block_taps(head, target)
    return read_layout(head, target).taps if is_eagle3(head) else None


def reads_lm_head(head: ModelDirectory) -> bool:
    """Whether ``head`` uses the target's LM head, and not one of its own."""
    if is_block_drafter(head):
        return LM_HEAD not in head.weight_files
    return not is_eagle3(head)
