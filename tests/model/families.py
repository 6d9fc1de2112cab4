"""Small random models of the supported families, in their on-disk layout."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

COMMON = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama3-rope-tied": LlamaConfig(
        **COMMON,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=False),
    "qwen2-sliding": Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=12, max_window_layers=3
    ),
    "qwen3": Qwen3Config(**COMMON, head_dim=24, tie_word_embeddings=True),
    "mistral-sliding": MistralConfig(**COMMON, sliding_window=16, head_dim=16),
}


def save(config: PretrainedConfig, folder: Path, *, seed: int = 0, shard: str = "60KB") -> Path:
    """Save random weights in shards, spread so that greedy choices are not near ties."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
