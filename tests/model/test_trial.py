"""Families that are tried at start: passed, refused in one line, and wrong stages found."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from flowspec.errors import ModelError
from flowspec.model.drafters.language_model import load_drafter
from flowspec.model.layers import block, trial
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import open_directory
from flowspec.model.weights.families import TESTED_FAMILIES
from tests.model.families import COMMON, FAMILIES, save


def default(family: str, **fields: object) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**fields)


@pytest.mark.parametrize(
    "config",
    [
        *(default(family) for family in ("olmo2", "cohere2", "starcoder2", "smollm3", "glm4")),
        default("granite", embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.2),
        default("qwen2_moe"),
        *(default(family) for family in TESTED_FAMILIES),
    ],
    ids=lambda config: config.model_type,
)
def test_a_small_copy_of_a_real_config_passes(config: PretrainedConfig) -> None:
    assert trial.try_small(config) < trial.TOLERANCE


def test_a_switch_of_the_config_is_in_the_copy() -> None:
    small = trial.small_config(default("gemma3_text", num_hidden_layers=48))
    assert small.num_hidden_layers == 4
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.sliding_window == 8
    assert small.query_pre_attn_scalar == 256


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("nanochat", "a small copy of it in two stages differs from the whole by"),
        ("deepseek_v3", "a small copy of it fails with RuntimeError"),
        ("granitemoe", "a small copy of it has no tensor model.layers.0.block_sparse_moe"),
        ("phi", "whose layers cannot be split here; tested families: llama"),
    ],
)
def test_what_cannot_be_split_is_one_line(tmp_path: Path, family: str, reason: str) -> None:
    fields = {**COMMON, "num_hidden_layers": 2}
    if family == "deepseek_v3":
        fields |= {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8}
    save(default(family, **fields), tmp_path)
    directory = open_directory(str(tmp_path))
    for load in (lambda: load_stage(directory, range(2)), lambda: load_drafter(directory)):
        with pytest.raises(ModelError) as raised:
            load()
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)
        assert "flowspec-trial" not in str(raised.value)


def test_wrong_stages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "windowed", lambda mask, *rest: mask)
    assert trial.try_small(FAMILIES["gemma2"]) > 100 * trial.TOLERANCE


def test_a_config_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(default("olmo2", **COMMON), tmp_path)
    tried: list[str] = []
    monkeypatch.setattr(trial, "_tried", {})
    monkeypatch.setattr(trial, "_fault", lambda config: tried.append(config.model_type) or "")
    for _ in range(2):
        trial.check_family(open_directory(str(tmp_path)))
    assert tried == ["olmo2"]
