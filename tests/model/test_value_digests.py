"""Digests of weights' values: equal for copies however split, other for any changed value."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowspec.model.weights import value_digests as module
from flowspec.model.weights.directory import ModelDirectory, open_directory
from flowspec.model.weights.tensor_files import NewTensor, read_header, write_tensors
from flowspec.model.weights.value_digests import group_of

Family = Callable[..., ModelDirectory]


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder, in use for files of any size and age."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CACHED_BYTES", 0)
    monkeypatch.setattr(module, "_SETTLED_SECONDS", -1e9)
    return tmp_path / "cache" / "flowspec" / "digests"


def merged(directory: ModelDirectory, folder: Path) -> ModelDirectory:
    """A copy with all tensors in one file, in another order."""
    folder.mkdir()
    names = sorted(directory.weight_files, reverse=True)
    entries = [directory.tensor(name) for name in names]
    tensors = [
        NewTensor(name, entry.dtype, entry.shape, entry.end - entry.start)
        for name, entry in zip(names, entries, strict=True)
    ]
    chunks = (chunk for entry in entries for chunk in entry.chunks())
    write_tensors(folder / "model.safetensors", tensors, chunks)
    shutil.copy(directory.path / "config.json", folder)
    return open_directory(str(folder))


def flip(path: Path, at: int) -> None:
    """Change one byte of a file, which keeps its size and its time of change."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_tensors_are_grouped_by_layer_and_module() -> None:
    assert group_of("model.layers.11.mlp.up_proj.weight") == "model.layers.11"
    assert group_of("layers.0.mlp.up_proj.weight") == "layers.0"
    assert group_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert group_of("lm_head.weight") == "lm_head"


def test_copies_split_into_other_files_have_equal_digests(family: Family, tmp_path: Path) -> None:
    directory = family("qwen2")
    other = merged(directory, tmp_path / "other")
    assert len(set(directory.weight_files.values())) > 1
    assert other.values() == directory.values()
    assert (other.identity, other.fingerprint) == (directory.identity, directory.fingerprint)


def test_a_changed_value_changes_its_group_only(llama_copy: Path, family: Family) -> None:
    before = family("llama")
    copy = open_directory(str(llama_copy))
    entry = copy.tensor("model.layers.3.mlp.up_proj.weight")
    flip(entry.file, entry.end - 1)
    found = copy.values()
    assert {group for group in found if found[group] != before.values()[group]} == {
        "model.layers.3"
    }
    assert copy.identity == before.identity
    assert copy.fingerprint != before.fingerprint


def test_only_asked_groups_are_read(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = family("llama")
    read: list[str] = []
    digest = module._tensor_digest
    monkeypatch.setattr(
        module, "_tensor_digest", lambda name, entry: read.append(name) or digest(name, entry)
    )
    found = directory.values(("model.layers.1.", "model.norm."))
    assert set(found) == {"model.layers.1", "model.norm"}
    assert {group_of(name) for name in read} == set(found)
    assert found.items() <= directory.values().items()


def test_groups_whose_files_are_not_here_are_left_out(llama_copy: Path, family: Family) -> None:
    copy = open_directory(str(llama_copy))
    gone = copy.weight_files["model.layers.2.mlp.up_proj.weight"]
    gone.unlink()
    lost = {group_of(name) for name, file in copy.weight_files.items() if file == gone}
    whole = family("llama").values()
    assert copy.values() == {group: whole[group] for group in whole if group not in lost}


def test_digests_are_cached_until_the_file_changes(llama_copy: Path, cached: Path) -> None:
    directory = open_directory(str(llama_copy))
    first = directory.values()
    assert len(list(cached.iterdir())) == len(set(directory.weight_files.values()))
    entry = directory.tensor("model.norm.weight")
    flip(entry.file, entry.start)
    assert directory.values() == first, "size and time of change are the same"
    os.utime(entry.file)
    assert directory.values()["model.norm"] != first["model.norm"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": 1}', "\xff"])
def test_a_cache_that_cannot_be_read_is_computed_again(
    llama_copy: Path, cached: Path, text: str
) -> None:
    directory = open_directory(str(llama_copy))
    first = directory.values()
    for file in cached.iterdir():
        file.write_text(text, encoding="latin-1")
    assert directory.values() == first
    assert all(json.loads(file.read_text())["tensors"] for file in cached.iterdir())
    shutil.rmtree(cached)
    cached.write_text("no folder", encoding="utf-8")
    assert directory.values() == first


def test_a_user_without_home_has_no_cache_and_the_same_digests(
    llama_copy: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = open_directory(str(llama_copy)).values()

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", none)
    assert open_directory(str(llama_copy)).values() == expected


def test_a_file_changed_a_moment_ago_is_not_cached(
    llama_copy: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_SECONDS", 1e9)
    open_directory(str(llama_copy)).values()
    assert not cached.exists()


def test_written_tensors_are_read_back(tmp_path: Path) -> None:
    tensors = [NewTensor("b", "U8", (3,), 3), NewTensor("a", "F32", (2, 1), 8)]
    write_tensors(tmp_path / "x.safetensors", tensors, [b"xyz", b"1234", b"5678"])
    found = read_header(tmp_path / "x.safetensors")
    assert b"".join(map(bytes, found["b"].chunks())) == b"xyz"
    assert b"".join(map(bytes, found["a"].chunks())) == b"12345678"
    from safetensors import safe_open

    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert set(opened.keys()) == {"a", "b"}
    with pytest.raises(AssertionError, match="7 bytes for 11"):
        write_tensors(tmp_path / "y.safetensors", tensors, [b"1234567"])
