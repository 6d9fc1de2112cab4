"""Telling EAGLE heads from language models by their directories. Needs no torch."""

from __future__ import annotations

from flowspec.errors import ModelError
from flowspec.model.directory import ModelDirectory

#: A tensor that every EAGLE head has, and no language model.
_HEAD_TENSOR = "fc.weight"


def is_head(directory: ModelDirectory) -> bool:
    """Whether the directory holds an EAGLE head instead of a language model."""
    return _HEAD_TENSOR in directory.weight_files


def check_head(head: ModelDirectory, target: ModelDirectory) -> None:
    """ModelError unless ``head`` is an EAGLE head of the target's shape."""
    if not is_head(head):
        raise ModelError(f"{head.path} is no EAGLE head: it has no tensor {_HEAD_TENSOR}")
    if head.hidden_size != target.hidden_size:
        raise ModelError(
            f"the head in {head.path} has hidden size {head.hidden_size}, "
            f"the target {target.hidden_size}; a head serves only the target it was trained for"
        )
