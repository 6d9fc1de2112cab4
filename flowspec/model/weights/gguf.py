"""GGUF files, llama.cpp's format, as model folders.

A file is opened once: config, tokenizer and an index of its tensors go into a folder of the user's
cache, by the library's own reading of the metadata. The weights stay where they are, and their rows
are dequantised while they are read. Source: the description of the format in ggml's repository.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from flowspec.errors import ModelError
from flowspec.model.weights.gguf_metadata import describe
from flowspec.model.weights.gguf_rows import DAMAGED
from flowspec.model.weights.tensor_files import TensorEntry, user_cache
from flowspec.observe import note

SUFFIX = ".gguf"
#: Raised when a folder in the cache would be written otherwise.
_VERSION = 7
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file that is named as GGUF's are."""
    return path.suffix == SUFFIX and path.is_file()


def folder_of(file: Path) -> Path:
    """The model folder of the GGUF ``file``, made at the first call; ModelError if it cannot be."""
    files = _parts(file)
    stamps = [[str(part), part.stat().st_size, part.stat().st_mtime_ns] for part in files]
    key = hashlib.sha256(json.dumps([_VERSION, stamps]).encode()).hexdigest()[:16]
    cache = ""
    try:
        folder = user_cache() / "gguf" / f"{file.stem}-{key}"
        if folder.is_dir():
            return folder
        cache = f", {folder.parent},"
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    except OSError as error:
        raise ModelError(
            f"the user's cache{cache} for the config and the tokenizer of {file} cannot be "
            f"written: {error.strerror}; set XDG_CACHE_HOME to a folder that can"
        ) from None
    note(f"reading config and tokenizer of {file.name} into {folder}")
    try:
        describe(files, made)
        made.chmod(0o755)
        if not folder.is_dir():  # another process may have been faster
            made.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "; free some room, or set XDG_CACHE_HOME to a folder with more" if full else ""
            raise ModelError(f"{folder} cannot be written: {error.strerror}{remedy}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _parts(file: Path) -> list[Path]:
    """All files of the model that ``file`` is one of, in their order."""
    file = file.resolve()
    split = _SPLIT.fullmatch(file.name)
    if split is None:
        return [file]
    count = int(split["count"])
    names = [f"{split['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    parts = [file.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{file} is one of {count} files, and {missing[0]} is not beside it")
    return parts


def read_index(file: Path) -> dict[str, TensorEntry]:
    """The tensors that a folder's index names; ModelError if one of their files is cut short."""
    noted = json.loads(file.read_text(encoding="utf-8"))
    entries = {
        name: TensorEntry(**{**known, "file": Path(known["file"]), "shape": tuple(known["shape"])})
        for name, known in noted.items()
    }
    for source in {entry.file for entry in entries.values()}:
        end = max(entry.end for entry in entries.values() if entry.file == source)
        if not source.is_file() or source.stat().st_size < end:
            raise ModelError(f"{source} is missing or cut short; {DAMAGED}")
    return entries
