"""Files of tensors in the safetensors format: reading headers, and writing. Needs no torch."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flowspec.errors import ConfigError, ModelError
from flowspec.observe import note

#: Largest safetensors header accepted, bytes; the format's own limit.
_MAX_HEADER = 100_000_000
#: Bytes read at a time.
_BUFFER = 1 << 20
#: Types whose bytes are read as they are.
PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: its file, absolute byte range, safetensors dtype name and shape.

    In a GGUF file the type may be one of its own. ``heads``: the rows of so many heads have their
    two halves interleaved; 0: rows lie in order. ``add``: to every value.
    """

    file: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    heads: int = 0
    add: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether the values are not the stored bytes."""
        return self.dtype not in PLAIN or bool(self.heads or self.add)

    def chunks(self) -> Iterator[memoryview]:
        """The tensor's bytes, each chunk valid until the next; ModelError if the file ends."""
        buffer = memoryview(bytearray(_BUFFER))
        left = self.end - self.start
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left:
                got = file.readinto(buffer[: min(left, _BUFFER)])
                if not got:
                    raise ModelError(f"weights file {self.file} is cut short; download it again")
                yield buffer[:got]
                left -= got


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: its name, safetensors dtype name, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


#: How the text file begins that Git LFS keeps in the place of a large one.
_LFS_POINTER = b"version "


@lru_cache(maxsize=256)
def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensor entries of one safetensors file, their ranges checked against the file's size."""
    if not path.is_file():
        raise ModelError(f"weights file {path} is missing; download the model again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == _LFS_POINTER:
            raise ModelError(
                f"weights file {path} is Git LFS's note of a file, not the file; fetch it with "
                "`git lfs pull` in its folder"
            )
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER or 8 + length > size:
            raise ModelError(
                f"weights file {path} is cut short or no safetensors file; download it again"
            )
        try:
            header = json.loads(file.read(length))
            entries = {
                name: TensorEntry(
                    path,
                    8 + length + int(entry["data_offsets"][0]),
                    8 + length + int(entry["data_offsets"][1]),
                    str(entry["dtype"]),
                    tuple(int(extent) for extent in entry["shape"]),
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ModelError(
                f"weights file {path} has a damaged header; download it again"
            ) from None
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end > size:
        raise ModelError(
            f"weights file {path} is cut short: {size} bytes of {end}; download it again"
        )
    return entries


def user_cache() -> Path:
    """FlowSpec's folder in the user's cache, which need not exist; OSError if there is no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise OSError(errno.ENOENT, "the user has no home folder") from None
    return Path(base) / "flowspec"


@contextmanager
def new_folder(out: Path, nbytes: int) -> Iterator[Path]:
    """A folder to fill with ``nbytes`` of weights, which becomes ``out`` unless the block fails.

    ConfigError if ``out`` exists, cannot be written or its disk has too little room.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already; name a folder that does not")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} to write {out.name} into; make it first")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ConfigError(
            f"{out} takes {nbytes / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB left; "
            "free some, or name a folder on another disk"
        )
    try:
        made = Path(tempfile.mkdtemp(dir=folder, prefix=f".{out.name}-"))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    note(f"writing {nbytes / 1e6:.1f} MB of weights into {out}")
    try:
        yield made
        made.chmod(0o755)
        made.rename(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_tensors(
    path: Path, tensors: Sequence[NewTensor], chunks: Iterable[bytes | memoryview]
) -> str:
    """Write a safetensors file of ``tensors`` and return its SHA-256.

    ``chunks``: their bytes, in their order; only one chunk is held at a time.
    """
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.nbytes)
    header = json.dumps(
        {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            for tensor, start, end in zip(tensors, ends[:-1], ends[1:], strict=True)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        written = -8 - len(header)
        for part in itertools.chain((struct.pack("<Q", len(header)), header), chunks):
            digest.update(part)
            written += file.write(part)
    assert written == ends[-1], f"{written} bytes for {ends[-1]}"
    return digest.hexdigest()
