"""What shows that a folder has an EAGLE head, and whether that fits a target. Needs no torch."""

from __future__ import annotations

from flowspec.errors import ModelError
from flowspec.model.weights.directory import ModelDirectory

#: A tensor that every EAGLE head and block drafter has, and no language model.
FC = "fc.weight"


def is_eagle(directory: ModelDirectory) -> bool:
    """Whether the directory holds a head of any kind."""
    return FC in directory.weight_files


def check_eagle(head: ModelDirectory, target: ModelDirectory) -> None:
    """ModelError unless ``head`` is an EAGLE head of the target's shape."""
    if not is_eagle(head):
        raise ModelError(f"{head.path} is no EAGLE head: it has no tensor {FC}")
    if head.hidden_size != target.hidden_size:
        raise ModelError(
            f"the head in {head.path} has hidden size {head.hidden_size}, "
            f"the target {target.hidden_size}; a head serves only the target it was trained for"
        )
