"""Telling EAGLE heads from language models by their directories. Needs no torch."""

from __future__ import annotations

from flowspec.errors import ModelError
from flowspec.model.directory import ModelDirectory
from flowspec.model.eagle3_layout import is_eagle3, read_layout
from flowspec.model.taps import Taps

#: A tensor that every EAGLE head has, and no language model.
_HEAD_TENSOR = "fc.weight"


def is_head(directory: ModelDirectory) -> bool:
    """Whether the directory holds an EAGLE head, of any version, instead of a language model."""
    return _HEAD_TENSOR in directory.weight_files


def head_name(directory: ModelDirectory) -> str:
    """What to call the head in ``directory``."""
    return "EAGLE-3 head" if is_eagle3(directory) else "EAGLE head"


def check_head(head: ModelDirectory, target: ModelDirectory) -> None:
    """ModelError unless ``head`` is an EAGLE head of the target's shape."""
    if not is_head(head):
        raise ModelError(f"{head.path} is no EAGLE head: it has no tensor {_HEAD_TENSOR}")
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
    return read_layout(head, target).taps if is_eagle3(head) else None


def reads_lm_head(head: ModelDirectory) -> bool:
    """Whether ``head`` uses the target's LM head, and not one of its own."""
    return not is_eagle3(head)
