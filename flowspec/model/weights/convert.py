"""A model's folder written anew with plain weights, for programs that read no GGUF files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from flowspec.errors import ConfigError
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.gguf_metadata import GGUF_INDEX
from flowspec.model.weights.precision import KEPT, OWN
from flowspec.model.weights.tensor_files import NewTensor, new_folder, write_tensors
from flowspec.model.weights.tensors import read_tensor

#: The types that are written, and safetensors' names of them.
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: A family whose checkpoints have one tensor for all experts, and how: from the first of its parts,
#: its name and all parts; and what follows the name.
_FUSED_FAMILY = "gpt_oss"
_FUSED = {
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "down_proj": ("down_proj", ("down_proj",)),
}
_FUSED_LEAF = {"weight": "", "bias": "_bias"}
_EXPERT = re.compile(r"(?P<owner>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.(?P<leaf>\w+)")


@dataclass(frozen=True, slots=True)
class LibraryTensor:
    """A tensor as the library's checkpoints have it; ``parts`` gives its values in their order."""

    shape: tuple[int, ...]
    parts: Callable[[torch.dtype], Iterator[torch.Tensor]]

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor; errors as ``read_tensor``'s."""
        found = torch.empty(math.prod(self.shape), dtype=dtype)
        at = 0
        for part in self.parts(dtype):
            found[at : at + part.numel()] = part.reshape(-1)
            at += part.numel()
        return found.view(self.shape)

    def chunks(self, dtype: torch.dtype) -> Iterator[memoryview]:
        """The bytes of the tensor."""
        for part in self.parts(dtype):
            values = part.contiguous().view(-1).view(torch.uint8)
            yield memoryview(values.numpy())  # type: ignore[arg-type]


def library_tensors(directory: ModelDirectory) -> dict[str, LibraryTensor]:
    """The tensors of a GGUF file by their names in the library's checkpoints, in that order."""
    made = {}
    for name in directory.weight_files:
        expert = _EXPERT.fullmatch(name)
        if directory.config["model_type"] != _FUSED_FAMILY or expert is None:
            made[name] = _whole(directory, name)
        elif expert["number"] == "0" and expert["part"] in _FUSED:
            whole = f"{expert['owner']}.{_FUSED[expert['part']][0]}{_FUSED_LEAF[expert['leaf']]}"
            made[whole] = _fused(directory, expert)
    return dict(sorted(made.items()))


def _whole(directory: ModelDirectory, name: str) -> LibraryTensor:
    entry = directory.tensor(name)
    return LibraryTensor(entry.shape, lambda dtype: iter((read_tensor(name, entry, dtype),)))


def _fused(directory: ModelDirectory, first: re.Match[str]) -> LibraryTensor:
    """One tensor of all experts: rows of gate and up in turn, and columns in the place of rows.

    ``first``: the name of the first expert's.
    """
    count = int(directory.config["num_local_experts"])
    parts = _FUSED[first["part"]][1]

    def values(dtype: torch.dtype) -> Iterator[torch.Tensor]:
        for number in range(count):
            names = [f"{first['owner']}.{number}.{part}.{first['leaf']}" for part in parts]
            each = [read_tensor(name, directory.tensor(name), dtype) for name in names]
            yield torch.stack(each, dim=1).flatten(0, 1).t()

    outputs, *inputs = directory.tensor(first[0]).shape
    return LibraryTensor((count, *inputs, len(parts) * outputs), values)


def write_folder(directory: ModelDirectory, out: Path, dtype: str) -> None:
    """Write ``directory`` to the new folder ``out``, all weights in ``dtype``, one at a time.

    It is there completely or not at all. ConfigError if it exists, cannot be written or its disk
    has too little room.
    """
    if not directory.of_gguf:
        raise ConfigError(f"{directory.path} is read as it is; only a GGUF file is converted")
    if dtype not in TYPES:
        raise ConfigError(f"is {dtype!r}; expected one of {', '.join(TYPES)}", "dtype")
    kind: torch.dtype = getattr(torch, dtype)
    found = library_tensors(directory)
    tensors = [
        NewTensor(name, TYPES[dtype], one.shape, math.prod(one.shape) * kind.itemsize)
        for name, one in found.items()
    ]
    chunks = chain.from_iterable(one.chunks(kind) for one in found.values())
    with new_folder(out, sum(tensor.nbytes for tensor in tensors)) as made:
        for file in directory.path.iterdir():
            if file.name not in (GGUF_INDEX, "config.json"):
                shutil.copyfile(file, made / file.name)
        config = json.dumps(_config(directory, dtype), indent=1)
        (made / "config.json").write_text(config, encoding="utf-8")
        write_tensors(made / "model.safetensors", tensors, chunks)


def _config(directory: ModelDirectory, dtype: str) -> dict[str, Any]:
    """The config of plain weights in ``dtype``, with the library's name of the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    own = {name: value for name, value in directory.config.items() if name not in (KEPT, OWN)}
    return {**own, "dtype": dtype, "architectures": [NAMES[own["model_type"]]]}
