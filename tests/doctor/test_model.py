"""Model folders: formats that are not read, incomplete ones, pairs that do not fit, memory."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.doctor.finding import Finding, Severity
from flowspec.doctor.model import (
    Ends,
    ModelFacts,
    TextFacts,
    check,
    check_names,
    check_texts,
    gather,
    locate,
    sizes,
)
from flowspec.model.weights.directory import open_directory
from tests.pair import DRAFT, TARGET

GIB = 1 << 30
FAMILIES = ("llama", "qwen2")
GOOD = ModelFacts(
    name="big",
    family="llama",
    layers=32,
    vocabulary=32_000,
    context=4096,
    stored="bfloat16",
    sizes={"float32": 28 * GIB, "bfloat16": 14 * GIB, "int8": 7 * GIB, "nf4": 4 * GIB},
)
TEXTS = TextFacts(32_000, named=frozenset({2}), ends=frozenset({2, 7}), chat_template=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the packaged target."""
    return Path(shutil.copytree(TARGET, tmp_path / "model"))


def change(folder: Path, file: str, **values: object) -> None:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **values}))


def ends(folder: Path) -> frozenset[int]:
    """The ids that end texts; the template is not asked."""
    return open_directory(str(folder)).eos


def trouble(target: object, draft: str = "ngram") -> Finding:
    """The only finding that is not OK."""
    found = check_names(str(target), draft, 64 * GIB, "auto", FAMILIES, ends)
    (bad,) = [finding for finding in found if finding.level is not Severity.OK]
    return bad


def findings(
    facts: ModelFacts, memory: int | None = 64 * GIB, dtype: str = "auto"
) -> list[Finding]:
    found = check(facts, memory, dtype, FAMILIES)
    return [finding for finding in found if finding.level is not Severity.OK]


def test_the_packaged_pair_is_good() -> None:
    found = list(check_names(TARGET, f"{DRAFT}+ngram:head", GIB, "auto", FAMILIES, ends))
    assert {finding.level for finding in found} == {Severity.OK}
    assert [finding.subject for finding in found] == [*["target"] * 3, *["draft"] * 3]
    assert found[2].found == "texts end at token 1"
    assert "EAGLE head" in found[-1].found


def test_a_missing_folder(tmp_path: Path) -> None:
    found = trouble(tmp_path / "none")
    assert found.level is Severity.ERROR
    assert "does not exist" in found.found


def test_a_hub_model_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = trouble("some-owner/no-such-model")
    assert found.level is Severity.WARNING
    assert "hf download some-owner/no-such-model" in found.remedy


def test_a_cached_hub_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = {}

    def cached(name: str, **options: object) -> str:
        called.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    assert locate("owner/model") == tmp_path
    assert called == {"local_files_only": True}


@pytest.mark.parametrize("step", ["locate", "open_directory"])
def test_a_file_that_may_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Root may read every file, so this step refuses."""

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "config.json"))

    monkeypatch.setattr(f"flowspec.doctor.model.{step}", refuse)
    found = trouble(folder)
    says = f"{folder / 'config.json'} cannot be used: Permission denied"
    assert (found.level, found.found) == (Severity.ERROR, says)


def test_git_lfs_pointers(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid x")
    found = trouble(folder)
    assert (found.level, found.remedy) == (Severity.ERROR, "run `git lfs pull` in the folder")


@pytest.mark.parametrize(
    ("file", "kind", "remedy"),
    [
        ("model-q4.gguf", "GGUF", "give the file itself: "),
        ("pytorch_model-00001-of-00002.bin", "torch's own format", "save_pretrained"),
    ],
)
def test_other_formats_say_how_to_convert(folder: Path, file: str, kind: str, remedy: str) -> None:
    (folder / "model.safetensors").unlink()
    assert "with `hf download`" in trouble(folder).remedy
    (folder / file).write_bytes(b"x")
    found = trouble(folder)
    assert found.level is Severity.ERROR
    assert kind in found.found
    assert remedy in found.remedy


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantised_checkpoints(folder: Path, method: str) -> None:
    change(folder, "config.json", quantization_config={"quant_method": method})
    found = trouble(folder)
    assert found.level is Severity.ERROR
    assert f"quantised by {method}" in found.found
    assert "original checkpoint" in found.remedy


def test_weights_cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    found = trouble(folder)
    assert found.level is Severity.ERROR
    assert "cut short" in found.found
    assert found.remedy == "download it again"


def test_a_shard_that_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "b.safetensors is missing" in trouble(folder).found


def test_a_target_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    found = trouble(folder)
    assert found.level is Severity.ERROR
    assert "has no tokenizer" in found.found
    assert "copy tokenizer.json" in found.remedy


def test_a_head_is_no_target() -> None:
    found = trouble("head")
    assert found.level is Severity.ERROR
    assert "can only draft" in found.found


def test_a_draft_with_another_tokenizer(folder: Path) -> None:
    change(folder, "tokenizer.json", normalizer={"type": "Lowercase"})
    found = trouble(TARGET, str(folder))
    assert (found.subject, found.level) == ("draft", Severity.ERROR)
    assert "different tokenizers" in found.found
    assert "same family" in found.remedy


def test_a_list_of_drafts_that_is_none() -> None:
    found = trouble(TARGET, "ngram+")
    assert (found.subject, found.level) == ("draft", Severity.ERROR)
    assert "DIR+ngram" in found.remedy


def test_an_untested_family() -> None:
    (found,) = findings(replace(GOOD, family="mamba"))
    assert found.level is Severity.WARNING
    assert "llama, qwen2" in found.remedy
    assert not [each for each in check(GOOD, None, "auto", ()) if each.level is not Severity.OK]


def test_memory() -> None:
    assert findings(GOOD, 15 * GIB) == []
    (found,) = findings(GOOD, 5 * GIB)
    assert found.level is Severity.WARNING
    assert "bfloat16 take 14.0 GiB, and 5.0 GiB are free" in found.found
    assert found.remedy == "split it over 3 such machines or more, or choose --dtype nf4"
    assert findings(GOOD, 5 * GIB, "nf4") == []
    (found,) = findings(GOOD, 15 * GIB, "float32")
    assert "28.0 GiB" in found.found
    assert findings(GOOD, None, "float32") == []


def test_the_end_of_a_text() -> None:
    (found,) = check_texts(TEXTS)
    assert (found.level, found.found) == (Severity.OK, "texts end at the tokens 2, 7")
    (found,) = check_texts(replace(TEXTS, named=frozenset(), ends=frozenset()))
    assert found.level is Severity.WARNING
    assert "generation_config.json" in found.remedy
    found, _ = check_texts(replace(TEXTS, named=frozenset({32_000})))
    assert found.level is Severity.WARNING
    assert "outside the vocabulary of 32000" in found.found
    (found,) = check_texts(replace(TEXTS, ends=None))
    assert found.level is Severity.WARNING
    assert "its chat template fails" in found.found


def test_no_chat_template() -> None:
    _, found = check_texts(replace(TEXTS, chat_template=False))
    assert found.level is Severity.NOTE
    assert "chat_template.jinja" in found.remedy


def test_facts_of_a_folder(folder: Path) -> None:
    def lines(ends: Ends = ends) -> list[str]:
        found = check_names(str(folder), "ngram", 64 * GIB, "auto", FAMILIES, ends)
        return [finding.found for finding in found if finding.subject == "target"]

    assert len(lines()) == 3
    assert lines(lambda _: frozenset({5, 6}))[-1] == "texts end at the tokens 5, 6"
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in lines()[-1]
    change(folder, "tokenizer_config.json", chat_template="{{ messages }}")
    assert len(lines()) == 3


def test_a_tokenizer_with_ids_beyond_the_models_vocabulary(folder: Path) -> None:
    written = json.loads((folder / "tokenizer.json").read_text())
    token = {"id": 100_000, "content": "beyond", "special": False} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    written["model"]["vocab"]["beyond"] = 100_000
    written["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(written))
    assert "beyond the model's vocabulary" in trouble(folder).found


def test_sizes_are_those_of_the_files() -> None:
    directory = open_directory(TARGET)
    found = sizes(directory)
    stored = gather("x", directory).stored
    entries = [directory.tensor(name) for name in directory.weight_files]
    kept = {entry.dtype for entry in entries}
    in_files = sum(entry.end - entry.start for entry in entries)
    each = {"F32": 4, "BF16": 2, "F16": 2}[kept.pop()]
    assert kept == set()
    assert found["float32"] == in_files * 4 // each
    assert found["bfloat16"] * 2 == found["float32"]
    assert found["nf4"] < found["int8"] < found["bfloat16"]
    assert stored in found
