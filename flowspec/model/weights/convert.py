"""A model's folder written anew with plain weights, for programs that read no GGUF files."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from flowspec.errors import ConfigError
from flowspec.model.weights import gguf
from flowspec.model.weights.directory import ModelDirectory
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
            if file.name != gguf.INDEX:
                shutil.copyfile(file, made / file.name)
        write_tensors(made / "model.safetensors", tensors, chunks())
        made.chmod(0o755)
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
