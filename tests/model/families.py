"""Small random models of the supported families, in their on-disk layout."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

COMMON = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 128,
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
    "qwen3": Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "mistral-sliding": MistralConfig(**COMMON, sliding_window=16, head_dim=16),
    "gemma2": Gemma2Config(
        **COMMON,
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=12,
        layer_types=["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        },
    ),
    "phi3": Phi3Config(**COMMON, sliding_window=16),
    "phi3-longrope": Phi3Config(
        **COMMON,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        },
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON,
        head_dim=32,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gpt-oss": GptOssConfig(
        **COMMON,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def save(config: PretrainedConfig, folder: Path, *, seed: int = 0, shard: str = "60KB") -> Path:
    """Save random weights in shards, spread so that greedy choices are not near ties."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
