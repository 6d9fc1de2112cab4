"""Bad model directories: each gets one clear line before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flowspec.cluster import Setup
from flowspec.errors import ModelError, installs
from flowspec.model.weights.directory import (
    ModelDirectory,
    check_pair,
    default_pair,
    fetch_weights,
    layer_range,
    layer_ranges,
    open_directory,
)
from flowspec.model.weights.same_tokenizer import difference
from flowspec.model.weights.tensor_files import NewTensor, write_tensors
from tests.pair import TARGET


def refused(name: object) -> str:
    with pytest.raises(ModelError) as raised:
        open_directory(str(name)).check_weights()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "does not exist" in refused("./models/nowhere")


def test_a_folder_whose_name_is_no_text_is_shown_readable(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    assert rf"{tmp_path}/caf\xe9 is not UTF-8 text" in refused(folder)


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


@pytest.fixture
def pair(llama_copy: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A target and a draft with the packaged tokenizer."""
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(llama_copy / "config.json", other)
    for folder in (llama_copy, other):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(TARGET) / name, folder)
    return llama_copy, other


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def save_again(folder: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def write_merges_as_text(tokenizer: dict[str, Any]) -> None:
    model = tokenizer["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]


def leave_defaults_out(tokenizer: dict[str, Any]) -> None:
    model = tokenizer["model"]
    for name in [name for name, value in model.items() if value is None or value is False]:
        del model[name]
    tokenizer["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    tokenizer["post_processor"] = None


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        save_again,
        lambda folder: rewrite(folder, write_merges_as_text),
        lambda folder: rewrite(folder, leave_defaults_out),
    ],
)
def test_one_tokenizer_may_be_written_in_several_ways(
    pair: tuple[Path, Path], change: Callable[[Path], None]
) -> None:
    target, draft = pair
    change(draft)
    check_pair(open_directory(str(target)), open_directory(str(draft)))


def swap_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add_a_token(tokenizer: dict[str, Any]) -> None:
    known = tokenizer["model"]["vocab"]["a"]
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": known, "content": "a"})


def swap_merges(tokenizer: dict[str, Any]) -> None:
    merges = tokenizer["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def fold_case(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Lowercase"}


def split_digits(tokenizer: dict[str, Any]) -> None:
    own = tokenizer["pre_tokenizer"]
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, own]}


def replace_a_sign(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "©"}, "content": "(c)"}


def words_alone(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["single_word"] = True


@pytest.mark.parametrize("role", ["draft", "middle model"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swap_tokens, "2 tokens differ, the first of them 'a' (id "),
        (lambda one: one["model"]["vocab"].update(zzz=5000), "'zzz' (no token of the target, id"),
        (add_a_token, "'a' is an added token of one of them"),
        (swap_merges, "they differ in the order in which tokens are merged"),
        (fold_case, "they make other ids of 'The'"),
        (split_digits, "they make other ids of '1234567890'"),
        (replace_a_sign, "they make other ids of 'a©b'"),
        (words_alone, "they make other ids of "),
        (lambda one: one["model"].update(ignore_merges=True), "they differ in whether tokens are"),
        (lambda one: one["model"].update(dropout=0.1), "they differ in how many merges"),
    ],
)
def test_what_differs_between_two_tokenizers_is_named(
    pair: tuple[Path, Path], change: Callable[[dict[str, Any]], object], says: str, role: str
) -> None:
    target, draft = pair
    rewrite(draft, change)
    with pytest.raises(ModelError) as refused:
        check_pair(open_directory(str(target)), open_directory(str(draft)), role)
    said = str(refused.value)
    assert said.startswith(f"{role} {draft} and target {target} have different tokenizers: ")
    assert says in said
    assert f"a {role} must share the target's" in said


def test_pieces_of_other_scores_are_named(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -2.5)]
    for name, score in (("one", -2.5), ("other", -3.5)):
        backend = Tokenizer(Unigram([*pieces[:-1], ("ab", score)], 0))
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / name)
    said = difference(tmp_path / "one", tmp_path / "other")
    assert said == "they differ in the scores of their tokens"


def test_tokens_that_another_file_adds_are_no_shared_ones(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    (draft / "added_tokens.json").write_text('{"<|mine|>": 5000}')
    with pytest.raises(ModelError, match=r"<\|mine\|>"):
        check_pair(open_directory(str(target)), open_directory(str(draft)))


def test_a_tokenizer_that_is_none_is_one_line(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    for content in ("no JSON", "{}", "[]", '{"model": {"type": "BPE"}}'):
        (draft / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match="cannot be loaded") as refused:
            check_pair(open_directory(str(target)), open_directory(str(draft)))
        assert "\n" not in str(refused.value)


def test_a_tokenizer_of_pieces_names_the_package_that_reads_it(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target, draft = pair
    copied = draft.parent / "copied"
    shutil.copytree(default_pair()[0], copied)
    for folder in (draft, copied):
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    monkeypatch.setattr("flowspec.model.weights.same_tokenizer.find_spec", lambda name: None)
    missing = re.escape(f"takes the package sentencepiece: {installs('sentencepiece')}")
    with pytest.raises(ModelError, match=missing):
        check_pair(open_directory(str(target)), open_directory(str(draft)))
    with pytest.raises(ModelError, match=missing):
        Setup(str(copied), "ngram", 1).check()
    assert capfd.readouterr() == ("", "")


def test_a_model_without_a_tokenizer_is_named(family: Callable[..., ModelDirectory]) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        family("llama").check_tokenizer()


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


def test_an_ordinary_token_that_a_config_names_ends_nothing_beside_a_generation_config(
    llama_copy: Path,
) -> None:
    """As the default of a config's class, 1 or 2, over the byte-level vocabulary of the model."""
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|endoftext|>"}]
    (llama_copy / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_directory(str(llama_copy)).eos == {7}
    (llama_copy / "generation_config.json").write_text("{}")
    assert open_directory(str(llama_copy)).eos == {1}
    config = json.loads((llama_copy / "config.json").read_text())
    (llama_copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 8}))
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert open_directory(str(llama_copy)).eos == {7, 8}


def test_texts_end_with_any_token_that_a_file_names(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert open_directory(str(llama_copy)).eos == {1, 3, 4}
    (llama_copy / "generation_config.json").unlink()
    assert open_directory(str(llama_copy)).eos == {1}
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|im_start|>"}]
    (llama_copy / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    for named in ("<|im_end|>", {"content": "<|im_end|>"}):
        (llama_copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert open_directory(str(llama_copy)).eos == {1, 7}
    listed = {"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}}
    (llama_copy / "tokenizer_config.json").write_text(json.dumps(listed))
    assert open_directory(str(llama_copy)).eos == {1, 9}
    (llama_copy / "tokenizer_config.json").write_text("{}")
    (llama_copy / "special_tokens_map.json").write_text('{"eos_token": {"content": "t"}}')
    (llama_copy / "tokenizer.json").write_text('{"model": {"vocab": {"s": 5, "t": 6}}}')
    assert open_directory(str(llama_copy)).eos == {1, 6}, "a token that is not an added one"
    unigram = {"model": {"vocab": [["s", 0.0], ["t", -1.0]]}, "added_tokens": []}
    (llama_copy / "tokenizer.json").write_text(json.dumps(unigram))
    assert open_directory(str(llama_copy)).tokenizer_eos == 1
    (llama_copy / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match=r"eos_token_id .* is no token id"):
        _ = open_directory(str(llama_copy)).eos


@pytest.mark.parametrize("file", ["../other/model.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_names_files_of_its_folder_only(llama_copy: Path, file: str) -> None:
    index = llama_copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    said = refused(llama_copy)
    assert f"names {file!r}, a file outside the folder" in said


def test_an_index_beside_a_single_file_is_an_old_one(llama_copy: Path) -> None:
    """The library reads the single file."""
    one = NewTensor("lm_head.weight", "F32", (1,), 4)
    write_tensors(llama_copy / "model.safetensors", [one], [bytes(4)])
    found = open_directory(str(llama_copy)).weight_files
    assert found == {"lm_head.weight": llama_copy / "model.safetensors"}


def test_a_missing_head_is_one_line(llama_copy: Path) -> None:
    index = llama_copy / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    del found["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(found))
    with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight, and by its config\.json"):
        _ = open_directory(str(llama_copy)).tied


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

    from flowspec.model.weights import directory as module

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
    from flowspec.model.layers.block import LayerBlock, tensor_prefixes

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
    from flowspec.model.drafters.sources import target_needs

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
    from flowspec.model.weights import directory as module

    (tmp_path / "config.json").write_bytes((family("llama").path / "config.json").read_bytes())
    write_tensors(tmp_path / "model.safetensors", [NewTensor("a", "U8", (1,), 1)], [b"x"])
    asked: list[list[str]] = []
    monkeypatch.setattr(
        module, "_snapshot", lambda name, patterns: asked.append(patterns) or tmp_path
    )
    fetch_weights("lab/small", lambda found: ("model.layers.0.",))
    assert "model.safetensors" not in asked[0]
    assert "model.safetensors" in asked[-1]
