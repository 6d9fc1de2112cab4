"""Shards: the source's own bits, and one clear line for a wrong, damaged or incomplete one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError, ModelError
from flowspec.model.layers.block import LayerBlock, tensor_prefixes
from flowspec.model.layers.expert_matrices import own_matrix
from flowspec.model.layers.placing import Placing
from flowspec.model.shards import ShardPlan, check_shard_dtype, parse_blocks, write_shards
from flowspec.model.weights.directory import (
    ModelDirectory,
    check_pair,
    default_pair,
    fetch_weights,
    layer_ranges,
    open_directory,
)
from flowspec.model.weights.manifest import AS_STORED, MANIFEST, VERSION
from tests.precisions import SERVED

Family = Callable[..., ModelDirectory]
WRITTEN = ("float32", "bfloat16", "float16", "int8", "nf4", "int4", "nf4-double")
DTYPES = [AS_STORED, *(name for name in WRITTEN if name in SERVED)]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two stages of the packaged target in int8."""
    target = open_directory(default_pair()[0])
    write_shards(target, ShardPlan(layer_ranges(target.layers, 2), "int8"), tmp_path / "out")
    return tmp_path / "out"


def rows_of(directory: ModelDirectory, layers: range, placing: Placing) -> bytes:
    """The bytes of what the block ``layers`` computes from three rows."""
    first = layers.start == 0
    last = layers.stop == directory.layers
    block = LayerBlock(directory, layers, first=first, last=last, placing=placing)
    ids = (0, 1, 2)
    tokens = (3, 4, 5) if first else ()
    part = Part(RunKey("j", 1), 0, ids, (-1, 0, 1), ids, tokens, ids, answers=(2,))
    source = torch.Generator().manual_seed(1)
    rows = None
    if not first:
        rows = torch.randn((3, directory.hidden_size), generator=source).numpy()
    hidden = block.run(part, rows, block.new_cache(8))
    result = block.logits(hidden) if last else hidden
    return result.float().numpy().tobytes()


@pytest.mark.parametrize("says", [True, None])
def test_a_shard_has_its_models_head_whatever_the_config_says(
    family: Family, tmp_path: Path, says: bool | None
) -> None:
    source = shutil.copytree(family("llama").path, tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["tie_word_embeddings"]
    config |= {} if says is None else {"tie_word_embeddings": says}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_pair()[0]) / name, source)
    target = open_directory(str(source))
    blocks = layer_ranges(target.layers, 2)
    write_shards(target, ShardPlan(blocks, AS_STORED), tmp_path / "out")
    last = open_directory(str(tmp_path / "out" / "stage-2"))
    placing = Placing("float32")
    assert rows_of(last, blocks[1], placing) == rows_of(target, blocks[1], placing)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_computes_what_the_source_computes(dtype: str, tmp_path: Path) -> None:
    precision = "bfloat16" if dtype == AS_STORED else dtype
    target = open_directory(default_pair()[0])
    blocks = layer_ranges(target.layers, 3)
    write_shards(target, ShardPlan(blocks, dtype), tmp_path / "out")
    for stage, layers in enumerate(blocks, start=1):
        found = fetch_weights(
            str(tmp_path / "out" / f"stage-{stage}"), lambda d, own=layers: tensor_prefixes(d, own)
        )
        assert found.shard is not None
        found.shard.check_stage(stage, layers)
        placing = Placing(precision)
        assert rows_of(found, layers, placing) == rows_of(target, layers, placing)
        assert found.identity == target.identity
        assert found.values() == target.values(tensor_prefixes(target, layers))


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2", "mistral-sliding"])
def test_a_shard_holds_its_stages_tensors_only(family: Family, name: str, tmp_path: Path) -> None:
    target = family(name)
    blocks = layer_ranges(target.layers, 3)
    write_shards(target, ShardPlan(blocks), tmp_path / "out")
    for stage, layers in enumerate(blocks, start=1):
        found = open_directory(str(tmp_path / "out" / f"stage-{stage}"))
        assert set(found.weight_files) == {
            tensor
            for tensor in target.weight_files
            if tensor.startswith(tensor_prefixes(target, layers))
        }
        for tensor in found.weight_files:
            assert b"".join(map(bytes, found.tensor(tensor).chunks())) == b"".join(
                map(bytes, target.tensor(tensor).chunks())
            )


def test_the_drafts_folder_speaks_for_the_whole_model(shards: Path) -> None:
    target = open_directory(default_pair()[0])
    found = fetch_weights(str(shards / "draft"), lambda d: ())
    assert found.values() == target.values()
    check_pair(target, found)
    assert (found.eos, found.context) == (target.eos, target.context)
    assert found.weight_files == {}
    assert not (shards / "stage-1" / "tokenizer.json").exists()


def test_quantised_shards_are_small(shards: Path) -> None:
    target = open_directory(default_pair()[0])
    (whole,) = set(target.weight_files.values())
    sizes = [(shards / f"stage-{n}" / "model.safetensors").stat().st_size for n in (1, 2)]
    assert sum(sizes) < whole.stat().st_size


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as raised:
        fetch_weights(str(folder), lambda found: ("",))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("at", [3, 20, -1, -4000])
def test_a_changed_byte_is_found(shards: Path, at: int) -> None:
    file = shards / "stage-2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert f"{file} was changed" in refused(shards / "stage-2")
    fetch_weights(str(shards / "stage-1"), lambda found: ("",))


def test_a_changed_config_is_found(shards: Path) -> None:
    file = shards / "stage-1" / "config.json"
    file.write_text(file.read_text().replace("1e-05", "2e-05").replace("1e-06", "2e-06"))
    assert f"{file} was changed" in refused(shards / "stage-1")


def test_a_short_and_a_missing_file_are_found(shards: Path) -> None:
    file = shards / "stage-1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} has" in refused(shards / "stage-1")
    file.unlink()
    assert "has lost its file model.safetensors" in refused(shards / "stage-1")


def test_a_changed_or_swapped_manifest_is_found(shards: Path) -> None:
    first, second = (shards / f"stage-{number}" / MANIFEST for number in (1, 2))
    kept = first.read_text()
    first.write_text(kept.replace('"int8"', '"int4"'))
    assert f"{first} was changed after it was written" in refused(shards / "stage-1")
    first.write_text(second.read_text())
    assert "its manifest says" in refused(shards / "stage-1")
    first.write_text("{")
    assert "cannot be read as a shard's manifest" in refused(shards / "stage-1")
    first.write_text("[]")
    assert "cannot be read as a shard's manifest" in refused(shards / "stage-1")


def test_a_newer_manifest_is_named(shards: Path) -> None:
    file = shards / "stage-1" / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": VERSION + 1}))
    assert f"has version {VERSION + 1}, and this FlowSpec reads version {VERSION}" in refused(
        shards / "stage-1"
    )


def test_another_stage_range_or_dtype_is_refused(shards: Path) -> None:
    shard = open_directory(str(shards / "stage-2")).shard
    assert shard is not None
    first, end = map(int, shard.layers.split("-"))
    shard.check_stage(2, range(first, end))
    for stage, layers in ((1, range(first, end)), (2, range(first - 1, end))):
        with pytest.raises(ModelError, match=f"is stage 2 of 2 with layers {shard.layers}, and "):
            shard.check_stage(stage, layers)
    assert shard.dtype_for("auto") == shard.dtype_for("int8") == "int8"
    with pytest.raises(ConfigError, match="was written in int8, and nf4 is asked for"):
        shard.dtype_for("nf4")


def test_codes_are_not_loaded_in_another_precision(shards: Path) -> None:
    found = open_directory(str(shards / "stage-1"))
    with pytest.raises(ModelError, match="in int8; it cannot be loaded in bfloat16"):
        LayerBlock(found, range(1), first=True, last=False, placing=Placing("bfloat16"))


def test_other_stages_tensors_are_not_there(shards: Path) -> None:
    found = open_directory(str(shards / "stage-1"))
    with pytest.raises(ModelError, match=r"it is a shard: stage 1 of 2 with layers 0-"):
        found.tensor("lm_head.weight")


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowspec.model import shards as module

    target = open_directory(default_pair()[0])
    plan = ShardPlan(layer_ranges(target.layers, 2))
    with pytest.raises(ConfigError, match="exists already"):
        write_shards(target, plan, shards)
    with pytest.raises(ConfigError, match="there is no folder"):
        write_shards(target, plan, tmp_path / "no" / "where")
    with pytest.raises(ModelError, match="is a shard itself"):
        write_shards(open_directory(str(shards / "stage-1")), plan, tmp_path / "again")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(ConfigError, match=r"its disk has 0.0 GB left"):
        write_shards(target, plan, tmp_path / "again")
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        write_shards(target, plan, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_blocks_of_layers_are_read_and_checked() -> None:
    assert parse_blocks("0-5 5-12", 12) == [range(5), range(5, 12)]
    for text in ("0-5", "0-5 6-12", "1-12", "0-5 5-5 5-12", "0-12 12-12", "", "a-b", "0-5,5-12"):
        with pytest.raises(ConfigError, match=r"layers .* (no blocks|do not follow)"):
            parse_blocks(text, 12)
    assert check_shard_dtype(None) == check_shard_dtype("auto") == AS_STORED
    with pytest.raises(ConfigError, match="is unknown"):
        check_shard_dtype("int3")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_shard_of_a_mixture_has_quantised_experts(
    family: Family, name: str, dtype: str, tmp_path: Path
) -> None:
    source = shutil.copytree(family(name).path, tmp_path / "source")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(default_pair()[0]) / file, source)
    directory = open_directory(str(source))
    blocks = layer_ranges(directory.layers, 2)
    write_shards(directory, ShardPlan(blocks, dtype), tmp_path / "parts")
    placing = Placing(dtype)
    for stage, block in enumerate(blocks, start=1):
        shard = open_directory(str(tmp_path / "parts" / f"stage-{stage}"))
        assert any(".experts." in name for name in shard.weight_files)
        assert not any(own_matrix(name) for name in shard.weight_files)
        assert rows_of(shard, block, placing) == rows_of(directory, block, placing)


def test_a_matrix_that_no_layout_has_is_not_taken_for_an_experts_own() -> None:
    prefix = "model.layers.0.mlp.experts"
    assert own_matrix(f"{prefix}.3.down_proj.weight")
    assert not any(map(own_matrix, (f"{prefix}.3.fc1.weight", f"{prefix}.down_proj.weight")))


def test_experts_in_one_tensor_are_not_quantised_in_shards_and_it_says_so(
    family: Family, tmp_path: Path
) -> None:
    directory = family("gpt-oss")
    blocks = layer_ranges(directory.layers, 2)
    with pytest.raises(ModelError, match=r"is a mixture.*leave out --dtype.*--dtype nf4"):
        write_shards(directory, ShardPlan(blocks, "nf4"), tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    write_shards(directory, ShardPlan(blocks), tmp_path / "parts")
