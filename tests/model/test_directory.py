"""Bad model directories: each gets one clear line before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import ModelError
from flowspec.model.directory import (
    ModelDirectory,
    check_pair,
    fetch_weights,
    layer_range,
    layer_ranges,
    open_directory,
)
from flowspec.model.tensor_files import NewTensor, write_tensors


def refused(name: object) -> str:
    with pytest.raises(ModelError) as raised:
        open_directory(str(name)).check_weights()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "does not exist" in refused("./models/nowhere")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("x")
    assert "expected a model directory" in refused(tmp_path / "weights.bin")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "expected a JSON object" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "not a decoder-only language model" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 4}')
    assert "a 'gpt2' model names its sizes otherwise" in refused(tmp_path)


def test_a_folder_that_belongs_to_a_model_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it is an adapter: merge it" in refused(tmp_path)
    shards = tmp_path / "parts"
    (shards / "draft").mkdir(parents=True)
    (shards / "draft" / "config.json").write_text("{}")
    assert f"it holds shards: give {shards / 'draft'} to the scheduler" in refused(shards)


def test_a_note_of_git_lfs_is_no_weights_file(llama_copy: Path) -> None:
    shard = next(llama_copy.glob("model-0*.safetensors"))
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "fetch it with `git lfs pull`" in refused(llama_copy)


def test_a_missing_shard(llama_copy: Path) -> None:
    shard = next(llama_copy.glob("model-0*.safetensors"))
    shard.unlink()
    message = refused(llama_copy)
    assert shard.name in message
    assert "missing" in message


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_shard(llama_copy: Path, keep: int) -> None:
    shard = next(llama_copy.glob("model-0*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:keep])
    assert "cut short" in refused(llama_copy)


def test_a_damaged_header(llama_copy: Path) -> None:
    shard = next(llama_copy.glob("model-0*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[8:12] = b"!!!!"
    shard.write_bytes(data)
    assert "damaged header" in refused(llama_copy)


def test_no_weights_at_all(llama_copy: Path) -> None:
    (llama_copy / "model.safetensors.index.json").unlink()
    assert "has no weights: no model.safetensors" in refused(llama_copy)


def test_different_tokenizers_are_refused(llama_copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((llama_copy / "config.json").read_text())
    for folder, vocabulary in ((llama_copy, {"a": 0}), (other, {"b": 0})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    check_pair(open_directory(str(llama_copy)), open_directory(str(llama_copy)))
    for role in ("draft", "middle model"):
        says = f"^{role} {other} and target {llama_copy} have different tokenizers; "
        says += f"a {role} must share"
        with pytest.raises(ModelError, match=says):
            check_pair(open_directory(str(llama_copy)), open_directory(str(other)), role)


def test_a_model_without_a_tokenizer_is_named(family: Callable[..., ModelDirectory]) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        _ = family("llama").vocabulary_fingerprint


@given(st.integers(1, 100), st.integers(1, 100))
def test_layers_are_split_evenly_and_completely(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ModelError, match=f"1 to {layers} are possible"):
            layer_ranges(layers, stages)
        return
    ranges = layer_ranges(layers, stages)
    assert [layer for block in ranges for layer in block] == list(range(layers))
    sizes = [len(block) for block in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_eos_comes_from_the_generation_config_first(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert open_directory(str(llama_copy)).eos == {3, 4}
    (llama_copy / "generation_config.json").unlink()
    assert open_directory(str(llama_copy)).eos == {1}


@pytest.fixture
def hub_cache(
    family: Callable[..., ModelDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A hub cache with lab/small as a download leaves it; nothing may be fetched."""
    import huggingface_hub.constants as constants

    snapshot = tmp_path / "models--lab--small" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--lab--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    for file in family("llama").path.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_name_is_found_in_the_local_cache(hub_cache: Path) -> None:
    assert open_directory("lab/small").path == hub_cache
    asked: list[Path] = []

    def needs(found: ModelDirectory) -> tuple[str, ...]:
        asked.append(found.path)
        return ("model.layers.0.",)

    assert fetch_weights("lab/small", needs).path == hub_cache
    assert asked == [hub_cache]


def test_a_hub_name_that_cannot_be_had_is_one_line(hub_cache: Path) -> None:
    message = refused("lab/other")
    assert "neither a local folder nor available from the hub" in message


@given(st.integers(2, 40), st.integers(1, 60))
def test_surplus_stages_have_no_layers_and_lie_between_the_ends(layers: int, stages: int) -> None:
    ranges = layer_ranges(layers, stages, surplus=True)
    assert len(ranges) == stages
    assert [layer for block in ranges for layer in block] == list(range(layers))
    assert ranges[0] and ranges[-1].stop == layers and len(ranges[-1]) > 0
    text = " ".join(f"{block.start}-{block.stop}" for block in ranges)
    assert [layer_range(text, stage) for stage in range(1, stages + 1)] == ranges


@pytest.fixture
def asked_of_hub(
    family: Callable[..., ModelDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """The patterns of every fetch of ``lab/small``, which brings the matching files."""
    import fnmatch

    from flowspec.model import directory as module

    source = family("llama").path
    asked: list[list[str]] = []

    def snapshot(name: str, patterns: list[str]) -> Path:
        assert name == "lab/small"
        asked.append(patterns)
        for file in source.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
                (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    monkeypatch.setattr(module, "_snapshot", snapshot)
    return asked


@pytest.mark.parametrize("layers", [range(2), range(2, 4), range(4, 6)])
def test_a_hub_models_stage_fetches_its_own_files_only(
    asked_of_hub: list[list[str]], family: Callable[..., ModelDirectory], layers: range
) -> None:
    from flowspec.model.block import LayerBlock, tensor_prefixes

    target = fetch_weights("lab/small", lambda found: tensor_prefixes(found, layers))
    prefixes = tensor_prefixes(target, layers)
    own = {file.name for name, file in target.weight_files.items() if name.startswith(prefixes)}
    here = {file.name for file in target.path.glob("*.safetensors")}
    assert here == own
    assert len(own) < len(set(target.weight_files.values()))
    assert len(asked_of_hub) == 2
    LayerBlock(target, layers, first=layers.start == 0, last=layers.stop == target.layers)
    assert target.identity == family("llama").identity
    assert target.values(prefixes) == family("llama").values(prefixes)


def test_a_hub_models_head_and_embedding_are_fetched_for_a_head(
    asked_of_hub: list[list[str]],
) -> None:
    from flowspec.model.sources import target_needs

    target = fetch_weights("lab/small", target_needs("head"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        target.tensor(name)
    with pytest.raises(ModelError, match="is missing"):
        target.check_weights()
    found = fetch_weights("lab/small", target_needs("ngram"))
    assert asked_of_hub[-1] == asked_of_hub[0], "no weights"
    assert set(found.weight_files) == set(target.weight_files)


def test_a_hub_model_in_one_file_is_fetched_whole(
    family: Callable[..., ModelDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowspec.model import directory as module

    (tmp_path / "config.json").write_bytes((family("llama").path / "config.json").read_bytes())
    write_tensors(tmp_path / "model.safetensors", [NewTensor("a", "U8", (1,), 1)], [b"x"])
    asked: list[list[str]] = []
    monkeypatch.setattr(
        module, "_snapshot", lambda name, patterns: asked.append(patterns) or tmp_path
    )
    fetch_weights("lab/small", lambda found: ("model.layers.0.",))
    assert "model.safetensors" not in asked[0]
    assert "model.safetensors" in asked[-1]
