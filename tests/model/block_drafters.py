"""Random block drafters in the published layouts, and the published pass over their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, Qwen3Config

from flowspec.model.drafters.block_drafter import BlockLayers
from flowspec.model.weights.directory import ModelDirectory, open_directory

TAPS = (0, 2, 4)
MASK = 7
BLOCK = 5


def save_block_drafter(
    folder: Path,
    *,
    vocabulary: int = 120,
    hidden: int = 64,
    deepspec: bool = False,
    bias: bool = False,
    drop: Sequence[str] = (),
    **told: Any,
) -> ModelDirectory:
    """A random drafter for the small models of ``families``; ``told`` replaces config entries."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        attention_bias=bias,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    torch.manual_seed(5)
    tensors = {}
    for name, value in BlockLayers(config).named_parameters():
        fresh = torch.randn(value.shape)
        tensors[name.removeprefix("body.")] = 0.2 * fresh if value.ndim > 1 else 1 + 0.5 * fresh
    tensors["fc.weight"] = 0.2 * torch.randn(hidden, len(TAPS) * hidden)
    settings: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    entries: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "dflash_config": settings,
        "num_target_layers": 6,
    }
    if deepspec:
        entries = {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": BLOCK,
            **settings,
            "markov_rank": 0,
            "num_anchors": 512,
            "enable_confidence_head": True,
        }
        tensors["embed_tokens.weight"] = torch.randn(vocabulary, hidden)
        tensors["lm_head.weight"] = torch.randn(vocabulary, hidden)
        tensors["confidence_head.proj.weight"] = torch.randn(1, hidden)
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in tensors.items() if name not in drop}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **entries, **told}))
    return open_directory(str(folder))


class Published:
    """The pass of the published code, from weights and config alone, without a cache."""

    def __init__(self, drafter: ModelDirectory, target: ModelDirectory) -> None:
        weights = load_file(drafter.path / "model.safetensors")
        whole = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
        self._whole: Any = whole
        self._weights = weights
        self._config = drafter.config
        own = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
        self.embedding = weights.get("embed_tokens.weight", own[0]).detach()
        self.lm_head = weights.get("lm_head.weight", own[1]).detach()

    @torch.inference_mode()
    def sums(self, tokens: Sequence[int]) -> torch.Tensor:
        """What ``fc`` gives for the rows of ``tokens``, ``[tokens, hidden]``."""
        states = self._whole.model(
            torch.tensor([list(tokens)]), output_hidden_states=True
        ).hidden_states
        tapped = torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1)
        return tapped @ self._weights["fc.weight"].T

    @torch.inference_mode()
    def rows(self, sums: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The rows of a block of ``tokens`` after a context with ``sums``, after the final norm."""
        context = self._norm(sums, "hidden_norm")
        hidden = self.embedding[list(tokens)]
        positions = torch.arange(len(sums) + len(tokens))
        for number in range(self._config["num_hidden_layers"]):
            layer = f"layers.{number}"
            normed = self._norm(hidden, f"{layer}.input_layernorm")
            hidden = hidden + self._attend(normed, context, positions, f"{layer}.self_attn")
            normed = self._norm(hidden, f"{layer}.post_attention_layernorm")
            gate = silu(self._linear(normed, f"{layer}.mlp.gate_proj"))
            raised = gate * self._linear(normed, f"{layer}.mlp.up_proj")
            hidden = hidden + self._linear(raised, f"{layer}.mlp.down_proj")
        return self._norm(hidden, "norm")

    def _attend(
        self, normed: torch.Tensor, context: torch.Tensor, positions: torch.Tensor, name: str
    ) -> torch.Tensor:
        """Every row of the block sees the whole context and the whole block."""
        size = self._config["head_dim"]
        both = torch.cat((context, normed))
        query = self._linear(normed, f"{name}.q_proj").view(len(normed), -1, size)
        key = self._linear(both, f"{name}.k_proj").view(len(both), -1, size)
        value = self._linear(both, f"{name}.v_proj").view(len(both), -1, size)
        query = self._rotated(self._norm(query, f"{name}.q_norm"), positions[len(context) :])
        key = self._rotated(self._norm(key, f"{name}.k_norm"), positions)
        shared = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self._linear(found.reshape(len(normed), -1), f"{name}.o_proj")

    def _rotated(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size = rows.shape[-1]
        theta = self._config["rope_parameters"]["rope_theta"]
        steps = theta ** (-torch.arange(0, size, 2) / size)
        angles = (positions[:, None] * steps).repeat(1, 2)[:, None]
        turned = torch.cat((-rows[..., size // 2 :], rows[..., : size // 2]), dim=-1)
        return rows * angles.cos() + turned * angles.sin()

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return self._weights[f"{name}.weight"] * (rows * scale)

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        product = rows @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return product if bias is None else product + bias
