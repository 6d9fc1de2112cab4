"""Random EAGLE-3 heads in their published layouts, and the published formula in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flowspec.model.weights.directory import ModelDirectory, open_directory

#: Shape of the heads' decoder layer: heads, key and value heads, values a head, feed-forward width.
HEADS, KEY_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Shape:
    """What a random head is like; ``vocabulary``: tokens that it can propose.

    ``layers``: the tapped ones; empty: the config names none. ``nested``: the ``speculators``
    dialect. ``extra``: keys of the config.
    """

    hidden: int = 64
    vocabulary: int = 50
    layers: tuple[int, ...] = (1, 3, 5)
    nested: bool = False
    normed: bool = False
    embeds: bool = False
    extra: Mapping[str, Any] | None = None


def save_eagle3(folder: Path, target: ModelDirectory, shape: Shape = Shape()) -> ModelDirectory:
    """A random head for ``target``."""
    torch.manual_seed(5)
    taps = len(shape.layers) or 3
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(target, shape, taps)
    layer = "layers.0." if shape.nested else "midlayer."
    named = {name.replace("midlayer.", layer): value for name, value in tensors.items()}
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(target, shape)))
    return open_directory(str(folder))


def _tensors(target: ModelDirectory, shape: Shape, taps: int) -> dict[str, torch.Tensor]:
    hidden, wide = shape.hidden, 2 * shape.hidden
    matrices = {
        "fc": (hidden, taps * target.hidden_size),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.k_proj": (KEY_HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.v_proj": (KEY_HEADS * HEAD_DIM, wide),
        "midlayer.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, hidden),
        "midlayer.mlp.up_proj": (INNER, hidden),
        "midlayer.mlp.down_proj": (hidden, INNER),
        "lm_head": (shape.vocabulary, hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {f"{name}.weight": 0.15 * torch.randn(form) for name, form in matrices.items()}
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(hidden)
    tensors["lm_head.weight"] *= 3
    if shape.embeds:
        tensors["embed_tokens.weight"] = torch.randn(target.vocabulary, hidden)
    if shape.vocabulary < target.vocabulary:
        ids = torch.randperm(target.vocabulary)[: shape.vocabulary].sort().values
        tensors["d2t"] = ids - torch.arange(shape.vocabulary)
        tensors["t2d"] = torch.zeros(target.vocabulary, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def _config(target: ModelDirectory, shape: Shape) -> dict[str, Any]:
    layer = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": target.vocabulary,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
    }
    head: dict[str, Any] = {"draft_vocab_size": shape.vocabulary}
    if shape.layers:
        head[IDS] = list(shape.layers)
    if shape.normed:
        head["norm_before_residual"] = True
    if shape.hidden != target.hidden_size:
        head["target_hidden_size"] = target.hidden_size
    head |= dict(shape.extra or {})
    if shape.nested:
        named = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        return {
            **named,
            **head,
            "model_type": "speculator_model",
            "transformer_layer_config": layer,
        }
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **head}


class Published:
    """The head as the authors compute it, over one causal sequence, without the project's code.

    Tokens are those from the second on, each beside the feature of the one before it; positions
    count from 0 at the second.
    """

    def __init__(self, head: ModelDirectory, target: ModelDirectory) -> None:
        stored = load_file(head.path / "model.safetensors")
        self.weights = {name.replace("layers.0.", "midlayer."): v for name, v in stored.items()}
        self.normed = bool(head.config.get("norm_before_residual", False))
        rope = head.config.get("rope_scaling") or {}
        self.factor = float(rope.get("factor", 1.0))
        name = "model.embed_tokens.weight"
        own = self.weights.get("embed_tokens.weight")
        self.embedding = load_file(target.weight_files[name])[name] if own is None else own
        self.size = target.vocabulary
        self.tokens = self.weights["lm_head.weight"].shape[0]
        self.hidden = self.weights["norm.weight"].shape[0]

    def norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weights[f"{name}.weight"] * (rows * scale)

    def last(self, tokens: Sequence[int], features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output row of the last of ``tokens``, which is its feature."""
        before = torch.stack(list(features))
        normed = self.norm(before, "midlayer.hidden_norm")
        embedded = self.norm(self.embedding[list(tokens)], "midlayer.input_layernorm")
        attended = self._attention(torch.cat((embedded, normed), dim=-1))
        rows = (normed if self.normed else before) + attended
        inner = self.norm(rows, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._times(inner, "mlp.gate_proj"))
        rows = rows + self._times(gate * self._times(inner, "mlp.up_proj"), "mlp.down_proj")
        return rows[-1]

    def scores(self, predicted: torch.Tensor) -> torch.Tensor:
        """Log-probabilities over the target's tokens; those that the head lacks have none."""
        logits = self.weights["lm_head.weight"] @ self.norm(predicted, "norm")
        ids = torch.arange(self.tokens)
        if self.tokens != self.size:
            ids = ids + self.weights["d2t"]
        found = torch.full((self.size,), -torch.inf)
        found[ids] = logits.log_softmax(-1)
        return found

    def _times(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows @ self.weights[f"midlayer.{name}.weight"].T

    def _attention(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        queries = self._turned(self._times(rows, "self_attn.q_proj").view(count, HEADS, HEAD_DIM))
        keys = self._turned(self._times(rows, "self_attn.k_proj").view(count, KEY_HEADS, HEAD_DIM))
        values = self._times(rows, "self_attn.v_proj").view(count, KEY_HEADS, HEAD_DIM)
        shared = HEADS // KEY_HEADS
        mixed = []
        for head in range(HEADS):
            products = queries[:, head] @ keys[:, head // shared].T / HEAD_DIM**0.5
            later = torch.ones(count, count).triu(1).bool()
            weights = products.masked_fill(later, -torch.inf).softmax(-1)
            mixed.append(weights @ values[:, head // shared])
        return self._times(torch.cat(mixed, dim=-1), "self_attn.o_proj")

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings of ``[positions, heads, head_dim]``."""
        half = HEAD_DIM // 2
        places = torch.arange(len(rows)) / self.factor
        angles = torch.outer(places, 10000.0 ** -(torch.arange(half) / half))
        cos, sin = (part[:, None].repeat(1, 1, 2) for part in (angles.cos(), angles.sin()))
        return rows * cos + torch.cat((-rows[..., half:], rows[..., :half]), dim=-1) * sin
