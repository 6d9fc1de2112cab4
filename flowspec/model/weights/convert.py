"""A model's folder written anew with plain weights, for programs that read no GGUF files."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowspec.errors import ConfigError
from flowspec.model.weights import gguf
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.precision import KEPT, OWN
from flowspec.model.weights.tensor_files import NewTensor, write_tensors
from flowspec.model.weights.tensors import read_tensor

#: The types that are written, and safetensors' names of them.
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_folder(directory: ModelDirectory, out: Path, dtype: str) -> None:
    """Write ``directory`` to the new folder ``out``, all weights in ``dtype``, one at a time.

    It is there completely or not at all. ConfigError if it exists or cannot be written.
    """
    if not directory.of_gguf:
        raise ConfigError(f"{directory.path} is read as it is; only a GGUF file is converted")
    if dtype not in TYPES:
        raise ConfigError(f"is {dtype!r}; expected one of {', '.join(TYPES)}", "dtype")
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a folder that does not")
    kind: torch.dtype = getattr(torch, dtype)
    entries = {name: directory.tensor(name) for name in sorted(directory.weight_files)}
    tensors = [
        NewTensor(name, TYPES[dtype], entry.shape, math.prod(entry.shape) * kind.itemsize)
        for name, entry in entries.items()
    ]

    def chunks() -> Iterator[memoryview]:
        for name, entry in entries.items():
            values = read_tensor(name, entry, kind).contiguous().view(-1)
            yield memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]

    try:
        made = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    try:
        for file in directory.path.iterdir():
            if file.name not in (gguf.INDEX, "config.json"):
                shutil.copyfile(file, made / file.name)
        config = json.dumps(_config(directory, dtype), indent=1)
        (made / "config.json").write_text(config, encoding="utf-8")
        write_tensors(made / "model.safetensors", tensors, chunks())
        made.chmod(0o755)
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _config(directory: ModelDirectory, dtype: str) -> dict[str, Any]:
    """The config of plain weights in ``dtype``, with the library's name of the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    own = {name: value for name, value in directory.config.items() if name not in (KEPT, OWN)}
    return {**own, "dtype": dtype, "architectures": [NAMES[own["model_type"]]]}
