"""Draft sources: names, checks, and what each name loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowspec.errors import ConfigError, FlowSpecError, ModelError
from flowspec.model.drafters.drafter_choice import wanting_hidden
from flowspec.model.drafters.eagle import EagleDrafter
from flowspec.model.drafters.hybrid import HybridDrafter
from flowspec.model.drafters.kinds import kind_of
from flowspec.model.drafters.language_model import ModelDrafter
from flowspec.model.drafters.ngram import NgramDrafter
from flowspec.model.drafters.sources import (
    check_sources,
    choices,
    fingerprint,
    labels,
    load_sources,
    open_models,
    source_names,
    target_needs,
)
from flowspec.model.weights.directory import PACKAGED, default_pair, local_path, open_directory

TARGET = open_directory(default_pair()[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("draft", ModelDrafter),
        ("head", EagleDrafter),
        ("ngram", NgramDrafter),
        ("head+ngram", HybridDrafter),
    ],
)
def test_a_name_loads_its_drafter(name: str, kind: type) -> None:
    check_sources(TARGET, name)
    drafter = load_sources(name, TARGET)
    assert type(drafter) is kind
    assert drafter.wants_hidden == ("head" in name)


def test_a_fingerprint_names_every_part() -> None:
    parts = fingerprint("draft+ngram").split("+")
    assert parts == [open_directory("draft").fingerprint, "ngram"]


def test_drafts_there_are_to_choose_from() -> None:
    name = "draft:head+ngram"
    check_sources(TARGET, name)
    assert source_names(name) == ("draft", "head", "ngram")
    assert fingerprint(name) == f"{fingerprint('draft')}:{fingerprint('head')}+ngram"
    assert wanting_hidden(load_sources(name, TARGET)) == (False, True)
    with pytest.raises(ConfigError, match="one choice twice"):
        source_names("ngram:ngram")
    with pytest.raises(ConfigError, match="is no list of drafters"):
        source_names("ngram:")


@pytest.mark.parametrize("other", ["{folder}", "{folder}/", "{folder}/../draft", "{link}"])
def test_two_names_of_one_folder_are_one(tmp_path: Path, other: str) -> None:
    (tmp_path / "link").symlink_to(str(local_path("draft")))
    name = other.format(folder=local_path("draft"), link=tmp_path / "link")
    with pytest.raises(
        ConfigError, match="names one choice twice; expected like DIR:ngram or DIR:DIR"
    ):
        choices(f"draft:{name}")
    with pytest.raises(ConfigError, match="is no list of drafters"):
        choices(f"head:draft+{name}")
    assert choices(f"draft:head+{name}") == ("draft", f"head+{name}")


def test_a_label_is_a_folders_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "small+fast"
    folder.mkdir(parents=True)
    assert labels(f"{folder}/:head+ngram:lab/tiny") == ("small+fast", "head+ngram", "lab/tiny")
    assert labels(default_pair()[1]) == ("draft",)
    assert labels("") == ("",)
    monkeypatch.chdir(folder)
    assert labels(".:ngram") == ("small+fast", "ngram")
    (tmp_path / "other" / "small+fast").mkdir(parents=True)
    both = (str(folder), str(tmp_path / "other" / "small+fast"))
    assert labels(":".join(both)) == both, "else they could not be told apart"
    assert labels("+".join(both)) == ("+".join(both),)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    assert labels("..:/:ngram") == ("small+fast", "/", "ngram")


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


@pytest.mark.parametrize("name", ["m:1b", "a+b", "a+b:c"])
def test_a_folders_name_stays_whole_among_others(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "a").mkdir()  # the longest name is meant
    assert choices(str(folder)) == (str(folder),)
    assert choices(f"{folder}+ngram") == (f"{folder}+ngram",)
    assert choices(f"head+{folder}:ngram: {folder} + draft") == (
        f"head+{folder}",
        "ngram",
        f"{folder}+draft",
    )
    assert source_names(f"head+{folder}:ngram:{folder}+draft") == (
        "head",
        str(folder),
        "ngram",
        "draft",
    )


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
    with pytest.raises(FlowSpecError, match="different tokenizers"):
        check_sources(TARGET, f"ngram+{foreign(tmp_path / 'draft')}")


def foreign(folder: Path) -> str:
    """A model of another tokenizer."""
    shutil.copytree(default_pair()[1], folder)
    (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace('"<pad>"', '"<nil>"')
    )
    return str(folder)


def test_a_setup_opens_as_target_and_middle_models() -> None:
    opened = open_models("target", "head+ngram", ("draft", "medium"))
    assert opened == (TARGET, (open_directory("draft"), open_directory("medium")))


@pytest.mark.parametrize(("name", "kind"), [("head", "an EAGLE head"), ("ngram", "ngram")])
@pytest.mark.parametrize("role", ["target", "middle model"])
def test_what_can_only_draft_is_refused_elsewhere(name: str, kind: str, role: str) -> None:
    with pytest.raises(ModelError) as raised:
        if role == "target":
            open_models(name, "draft")
        else:
            open_models("target", "draft", ("medium", name))
    assert str(raised.value) == (
        f"the {role} is {name}, and {kind} can only draft; "
        f"expected a language model: give one as the {role}, and {name} as the draft"
    )


def test_a_head_is_known_by_its_tensors_and_not_by_what_it_lacks(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(str(local_path("head")), head)
    shutil.copy(Path(default_pair()[0]) / "tokenizer.json", head)
    with pytest.raises(
        ModelError, match=f"the middle model is {head}, and an EAGLE head can only draft"
    ):
        open_models("target", "draft", (str(head),))


def test_a_hub_model_is_told_apart_by_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single weights file is fetched, since the tensors' names are in it."""

    def snapshot(name: str, patterns: list[str]) -> Path:
        for file in Path(str(local_path(name.removeprefix("lab/")))).iterdir():
            if any(file.match(pattern) for pattern in patterns):
                (tmp_path / name).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, tmp_path / name)
        return tmp_path / name

    monkeypatch.setattr("flowspec.model.weights.directory._snapshot", snapshot)
    target, (middle,) = open_models("lab/target", "ngram", ("lab/medium",))
    assert (target.fingerprint, middle.fingerprint) == (
        TARGET.fingerprint,
        open_directory("medium").fingerprint,
    )
    with pytest.raises(
        ModelError, match="the middle model is lab/head, and an EAGLE head can only draft"
    ):
        open_models("lab/target", "ngram", ("lab/head",))


def test_a_folder_called_ngram_is_the_model_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(default_pair()[0], tmp_path / "ngram")
    monkeypatch.chdir(tmp_path)
    target, _ = open_models("ngram", "draft")
    assert target.path == Path("ngram")


def test_a_setup_names_the_model_whose_tokenizer_differs(tmp_path: Path) -> None:
    other = foreign(tmp_path / "other")
    with pytest.raises(
        ModelError, match=f"draft {other} and target .* a draft must share the target's"
    ):
        open_models("target", other, ("medium",))
    with pytest.raises(
        ModelError,
        match=f"middle model {other} and target .* a middle model must share the target's",
    ):
        open_models("target", "draft", ("medium", other))


def test_a_target_without_a_tokenizer_is_refused_whatever_drafts(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(default_pair()[0], bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="it has no tokenizer"):
        open_models(str(bare), "ngram")


def test_the_packaged_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(local_path(name) is not None for name in PACKAGED)
    assert kind_of(open_directory("head")).reads_target
    assert not kind_of(open_directory("medium")).reads_target
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    assert local_path("draft") == Path("draft"), "a folder of that name takes precedence"
