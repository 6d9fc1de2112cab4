"""Digests of weights' values, by group of tensors: a decoder layer, the embedding, the LM head.

A group's digest covers names, types, shapes and stored bytes of its tensors, not the files that
they lie in: it is the same for copies that are split into other files, and a stage can check its
own layers without the rest. Reading a large checkpoint takes long, so digests of large files are
cached in the user's cache folder, for as long as size, time of change and inode stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from flowspec.model.weights.tensor_files import TensorEntry, user_cache
from flowspec.observe import logger

#: Files below this size, bytes, are read each time; it takes a fraction of a second.
CACHED_BYTES = 64 << 20
#: A file changed more recently than this, seconds, may change again within its time stamp.
_SETTLED_SECONDS = 2.0
#: Time between two lines on progress, seconds.
_PROGRESS_SECONDS = 10.0
_DIGITS = 16
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")


def group_of(tensor: str) -> str:
    """The group of the tensor named ``tensor``: its layer, else its module."""
    layer = _LAYER.match(tensor)
    return layer[0] if layer else tensor.rpartition(".")[0]


def of_prefixes(group: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the tensors of ``group`` start with one of ``prefixes``."""
    return f"{group}.".startswith(prefixes)


def group_digests(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The digest of every group of ``tensors``, which are by name and complete groups."""
    files: dict[Path, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        files.setdefault(entry.file, {})[name] = entry
    found = {
        name: digest
        for file, entries in sorted(files.items())
        for name, digest in _tensor_digests(file, entries).items()
    }
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        groups.setdefault(group_of(name), []).append(found[name])
    return {group: digest_of(parts) for group, parts in sorted(groups.items())}


def digest_of(parts: Iterable[str]) -> str:
    """The digest of a list of texts."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:_DIGITS]


def _tensor_digests(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """SHA-256 of each of ``entries``, all in ``file``, from the cache if it has them."""
    state = file.stat()
    if state.st_size < CACHED_BYTES:
        return {name: _tensor_digest(name, entry) for name, entry in entries.items()}
    known = _cached(file, state)
    missing = [
        name for name in sorted(entries, key=lambda n: entries[n].start) if name not in known
    ]
    if missing:
        known |= _read(file, {name: entries[name] for name in missing})
        if time.time() - state.st_mtime > _SETTLED_SECONDS:
            _store(file, state, known)
    return {name: known[name] for name in entries}


def _read(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    log = logger()
    found = {}
    size = sum(entry.end - entry.start for entry in entries.values())
    done = 0
    told = time.monotonic()
    for name, entry in entries.items():
        found[name] = _tensor_digest(name, entry)
        done += entry.end - entry.start
        if time.monotonic() - told > _PROGRESS_SECONDS:
            told = time.monotonic()
            log.warning("computing digests of weights", file=str(file), percent=100 * done // size)
    return found


def _tensor_digest(name: str, entry: TensorEntry) -> str:
    digest = hashlib.sha256(json.dumps([name, entry.dtype, entry.shape]).encode())
    for chunk in entry.chunks():
        digest.update(chunk)
    return digest.hexdigest()


def _cache_file(file: Path) -> Path:
    name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    return user_cache() / "digests" / f"{name}.json"


def _state(state: os.stat_result) -> list[int]:
    return [state.st_size, state.st_mtime_ns, state.st_ino, state.st_dev]


def _cached(file: Path, state: os.stat_result) -> dict[str, str]:
    """What the cache holds for ``file`` in ``state``; nothing if it cannot be read."""
    try:
        noted = json.loads(_cache_file(file).read_text(encoding="utf-8"))
        if noted["state"] == _state(state):
            return {str(name): str(digest) for name, digest in noted["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _store(file: Path, state: os.stat_result, tensors: Mapping[str, str]) -> None:
    """Note the digests; without a cache folder they are computed again next time."""
    text = json.dumps({"state": _state(state), "file": str(file), "tensors": dict(tensors)})
    with contextlib.suppress(OSError):
        place = _cache_file(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            written.write(text)
        Path(name).replace(place)
