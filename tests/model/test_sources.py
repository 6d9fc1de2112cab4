"""What drafts: names, checks, and what each name loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowspec.errors import ConfigError, FlowSpecError, ModelError
from flowspec.model.directory import PACKAGED, default_pair, local_path, open_directory
from flowspec.model.drafter import ModelDrafter
from flowspec.model.eagle import EagleDrafter
from flowspec.model.hybrid import HybridDrafter
from flowspec.model.ngram import NgramDrafter
from flowspec.model.sources import check_sources, fingerprint, is_head, load_sources, source_names, target_needs

TARGET = open_directory(default_pair()[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("draft", ModelDrafter), ("head", EagleDrafter), ("ngram", NgramDrafter), ("head+ngram", HybridDrafter)],
)
def test_a_name_loads_its_drafter(name: str, kind: type) -> None:
    check_sources(TARGET, name)
    drafter = load_sources(name, TARGET)
    assert type(drafter) is kind
    assert drafter.wants_hidden == ("head" in name)


def test_a_fingerprint_names_every_part() -> None:
    parts = fingerprint("draft+ngram").split("+")
    assert parts == [open_directory("draft").fingerprint, "ngram"]


def test_only_a_head_needs_the_targets_ends() -> None:
    assert target_needs("draft+ngram")(TARGET) == ("config only",)
    assert "model.embed_tokens." in target_needs("ngram+head")(TARGET)


@pytest.mark.parametrize("name", ["", "+", "draft+", "draft+draft", "ngram+ngram"])
def test_a_list_of_drafters_has_no_gaps_and_no_doubles(name: str) -> None:
    with pytest.raises(ConfigError, match="is no list of drafters"):
        source_names(name)


def test_a_folder_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    shutil.copytree(default_pair()[1], folder)
    assert source_names(str(folder)) == (str(folder),)


def test_a_drafter_that_cannot_draft_for_the_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        check_sources(TARGET, "ngram+nowhere")
    other = tmp_path / "head"
    shutil.copytree(str(local_path("head")), other)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"hidden_size": 192', '"hidden_size": 96')
    )
    with pytest.raises(ModelError, match="hidden size 96, the target 192"):
        check_sources(TARGET, str(other))
    foreign = tmp_path / "draft"
    shutil.copytree(default_pair()[1], foreign)
    (foreign / "tokenizer.json").write_text((foreign / "tokenizer.json").read_text().replace('"<pad>"', '"<nil>"'))
    with pytest.raises(FlowSpecError, match="different tokenizers"):
        check_sources(TARGET, f"ngram+{foreign}")


def test_the_packaged_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(local_path(name) is not None for name in PACKAGED)
    assert is_head(open_directory("head"))
    assert not is_head(open_directory("medium"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    assert local_path("draft") == Path("draft"), "a folder of that name comes first"
