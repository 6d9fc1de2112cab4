"""The published layouts of EAGLE-3 heads, and what is refused before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowspec.doctor.model import check_names
from flowspec.errors import ConfigError, ModelError
from flowspec.model.drafters.eagle3_layout import read_layout
from flowspec.model.drafters.kinds import EAGLE3, kind_of
from flowspec.model.drafters.sources import check_sources, recorded_taps, taps_of
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import ModelDirectory, open_directory
from tests.model.eagle3_heads import IDS, Shape, save_eagle3

Family = Callable[..., ModelDirectory]


@pytest.mark.parametrize("nested", [False, True], ids=["authors", "speculators"])
def test_both_dialects_are_read(family: Family, tmp_path: Path, nested: bool) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(nested=nested, normed=nested))
    assert kind_of(head) is EAGLE3
    kind_of(head).check(head, target)
    found = read_layout(head, target)
    assert found.taps == Taps(str(tmp_path), "fc.weight", (1, 3, 5), 64)
    assert found.layer == ("layers.0." if nested else "midlayer.")
    assert (found.vocabulary, found.mapped, found.normed) == (50, True, nested)


def test_language_models_and_other_heads_are_not_taken_for_one(family: Family) -> None:
    assert kind_of(family("llama")) is not EAGLE3
    assert kind_of(open_directory("head")) is not EAGLE3


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({}, (2, 6, 9)),
        ({IDS: [1, 5, 9]}, (1, 5, 9)),
        ({IDS: [0, 5, 12]}, (0, 5, 12)),
        ({"eagle_config": {IDS: [], "use_mtp_layernorm": False}}, (2, 6, 9)),
        ({"eagle_config": {IDS: [1, 5, 8], "use_aux_hidden_state": True}}, (2, 6, 9)),
    ],
    ids=["default", "inputs", "ends", "none", "outputs"],
)
def test_the_tapped_layers(
    tmp_path: Path, extra: Mapping[str, Any], layers: tuple[int, ...]
) -> None:
    """Ids at the top name layers by their input, those in ``eagle_config`` by their output."""
    target = open_directory("target")
    head = save_eagle3(tmp_path, target, Shape(hidden=192, layers=(), extra=extra))
    assert read_layout(head, target).taps.layers == layers


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({IDS: [3, 1, 5]}, r"reads the layers \[3, 1, 5\] of a target of 6 layers"),
        ({IDS: [1, 1, 5]}, "expected ascending numbers from 0 to 6"),
        ({IDS: [1, 3, 7]}, "expected ascending numbers from 0 to 6"),
        ({IDS: None}, r"reads the layers \[2, 3, 3\] of a target of 6 layers"),
        ({IDS: [1, 2, 3, 4, 5]}, r"fc.weight has shape \(64, 192\); expected \(64, 320\)"),
        ({"target_hidden_size": 128}, "for a target of hidden size 128 and 120 tokens"),
        ({"vocab_size": 121}, "of hidden size 64 and 121 tokens, the target has 64 and 120"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; of EAGLE-3 heads only those with 1"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'; of EAGLE-3 heads"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"norm_output": True}, "norm_output is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary embeddings of type dynamic"),
    ],
)
def test_what_is_not_understood_is_refused(
    family: Family, tmp_path: Path, extra: Mapping[str, Any], why: str
) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(extra=extra))
    with pytest.raises(ModelError, match=why) as refused:
        kind_of(head).check(head, target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["fc_norm.0.weight", "midlayer.self_attn.q_norm.weight"])
def test_a_tensor_that_no_layout_has_is_refused(family: Family, tmp_path: Path, name: str) -> None:
    target = family("llama")
    head = changed(save_eagle3(tmp_path, target), added={name: torch.ones(64)})
    with pytest.raises(ModelError, match=f"has the tensor {name}, which no known layout"):
        kind_of(head).check(head, target)


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("lm_head.weight", "has no tensor lm_head.weight: it is incomplete"),
        ("midlayer.mlp.up_proj.weight", "has no tensor midlayer.mlp.up_proj.weight"),
        ("d2t", "proposes 50 of 120 tokens, and has no tensor d2t"),
    ],
)
def test_an_incomplete_head_is_refused(
    family: Family, tmp_path: Path, missing: str, why: str
) -> None:
    target = family("llama")
    head = changed(save_eagle3(tmp_path, target), without=missing)
    with pytest.raises(ModelError, match=why):
        kind_of(head).check(head, target)


def test_another_width_needs_an_embedding(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(hidden=48))
    with pytest.raises(ModelError, match=r"and no embed_tokens.weight of its own"):
        kind_of(head).check(head, target)


def changed(
    head: ModelDirectory, added: Mapping[str, torch.Tensor] | None = None, without: str = ""
) -> ModelDirectory:
    file = head.path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if name != without}
    folder = head.path / "changed"
    folder.mkdir()
    save_file({**kept, **(added or {})}, folder / file.name)
    (folder / "config.json").write_text((head.path / "config.json").read_text())
    return open_directory(str(folder))


def test_weights_in_torchs_format_are_refused_with_a_command_that_converts_them(
    family: Family, tmp_path: Path
) -> None:
    head = save_eagle3(tmp_path, family("llama"))
    stored = load_file(head.path / "model.safetensors")
    torch.save(stored, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only safetensors are read; python -c") as refused:
        open_directory(str(tmp_path))
    code = str(refused.value).partition('"')[2].partition('"')[0]
    exec(code, {})
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in stored.items())
    assert kind_of(open_directory(str(tmp_path))) is EAGLE3


def test_one_head_that_reads_inside_the_target_is_all_that_a_draft_may_have(
    family: Family, tmp_path: Path
) -> None:
    target = family("llama")
    first, second = (str(save_eagle3(tmp_path / name, target).path) for name in ("a", "b"))
    assert taps_of("ngram", target) is None
    for draft in (first, f"{first}+ngram", f"ngram:{first}"):
        found = taps_of(draft, target)
        assert found is not None
        assert found.drafter == first
    for draft in (f"{first}:{second}", f"{first}+{second}"):
        with pytest.raises(ConfigError, match=r"has 2 heads, of which .*a reads hidden rows"):
            check_sources(target, draft)


def test_a_record_names_the_head_and_its_fingerprint(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target)
    assert recorded_taps("ngram", target) == ""
    found = Taps.read(recorded_taps(str(head.path), target))
    plain = taps_of(str(head.path), target)
    assert plain is not None
    assert found == replace(plain, fingerprint=head.fingerprint)
    assert json.loads(found.text())["layers"] == [1, 3, 5]


def test_doctor_knows_the_head(tmp_path: Path) -> None:
    target = open_directory("target")
    head = save_eagle3(tmp_path / "good", target, Shape(hidden=192, layers=()))
    wrong = save_eagle3(tmp_path / "bad", target, Shape(hidden=192, extra={"fc_norm": True}))
    found = list(
        check_names("target", str(head.path), None, "auto", (), lambda folder: frozenset())
    )
    assert any("is an EAGLE-3 head of the target's shape" in one.found for one in found)
    found = list(
        check_names("target", str(wrong.path), None, "auto", (), lambda folder: frozenset())
    )
    assert any("fc_norm is True" in one.found for one in found)
