"""Families of models, by the ``model_type`` of their config. Needs no torch."""

from __future__ import annotations

#: Families for which the test suite compares stages with the whole model.
TESTED_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"),
    *("mixtral", "qwen3_moe", "gpt_oss"),
)
