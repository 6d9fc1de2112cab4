"""Reading the tensors of a drafter that is no language model: shapes checked, linears packed."""

from __future__ import annotations

import torch

from flowspec.errors import ModelError
from flowspec.model.layers.linear import load_linear
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.stored_weight import StoredWeight
from flowspec.model.weights.tensor_files import TensorEntry
from flowspec.model.weights.tensors import read_tensor

#: Names in a target's checkpoint.
TARGET_EMBEDDING = "model.embed_tokens.weight"
TARGET_LM_HEAD = "lm_head.weight"


def checked_entry(directory: ModelDirectory, name: str, shape: tuple[int, ...]) -> TensorEntry:
    """The entry of tensor ``name``; ModelError unless it has ``shape``."""
    entry = directory.tensor(name)
    if entry.shape != shape:
        raise ModelError(f"{directory.path}: {name} has shape {entry.shape}; expected {shape}")
    return entry


def read_checked(
    directory: ModelDirectory,
    name: str,
    shape: tuple[int, ...],
    placing: Placing,
    kind: torch.dtype | None = None,
) -> torch.Tensor:
    """Tensor ``name`` in the type ``kind``, by default that of rows; errors as above."""
    entry = checked_entry(directory, name, shape)
    return read_tensor(name, entry, kind or placing.rows).to(placing.device)


def read_linear(
    directory: ModelDirectory, name: str, shape: tuple[int, int], placing: Placing
) -> torch.nn.Module:
    """The matrix ``name`` as a linear layer of the placing's kernel, without a bias."""
    checked_entry(directory, name, shape)
    weight = StoredWeight(directory, name)
    return load_linear(weight, placing.precision, placing.rows, placing.device)


def read_lm_head(
    directory: ModelDirectory, name: str, shape: tuple[int, int], placing: Placing
) -> torch.nn.Module:
    """The matrix ``name`` as an LM head."""
    checked_entry(directory, name, shape)
    weight = StoredWeight(directory, name)
    return load_linear(weight, placing.head, placing.head_rows, placing.device)
