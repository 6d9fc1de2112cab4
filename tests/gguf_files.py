"""Small GGUF files of random weights, in the layouts that llama.cpp's converter publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    quants,
)

from flowspec.model.weights.directory import default_pair

HIDDEN, FEED, HEADS, KEYS, SIZE, LAYERS, EXPERTS = 256, 256, 4, 2, 64, 2, 3
_MERGES = 40
#: Families of mixtures.
MIXTURES = ("qwen2moe", "qwen3moe", "gpt-oss", "minimax-m2")
#: Bytes of a block of the types that the package only reads, where its two-byte scales lie.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82)}


def vocabulary() -> tuple[list[str], list[str]]:
    """The first tokens and merges of the packaged target's tokenizer: bytes and some pairs."""
    model = json.loads((Path(default_pair()[0]) / "tokenizer.json").read_text(encoding="utf-8"))
    known: dict[str, int] = model["model"]["vocab"]
    merges = [" ".join(pair) for pair in model["model"]["merges"]]
    alphabet = len(known) - len(merges)
    return sorted(known, key=known.__getitem__)[: alphabet + _MERGES], merges[:_MERGES]


def shapes(family: str, *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of ``family`` by GGUF's names."""
    tokens = len(vocabulary()[0])
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not (tied or family.startswith("gemma")):
        found["output.weight"] = (tokens, HIDDEN)
    layer = _attention(family) | _feed_forward(family)
    if family.startswith("gemma"):
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    for at in range(LAYERS):
        found |= {f"blk.{at}.{name}": shape for name, shape in layer.items()}
    return found


def _attention(family: str) -> dict[str, tuple[int, ...]]:
    width, keys = HEADS * SIZE, KEYS * SIZE
    found: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_output.weight": (HIDDEN, width),
        "ffn_norm.weight": (HIDDEN,),
    }
    if family == "phi3":
        return found | {"attn_qkv.weight": (width + 2 * keys, HIDDEN)}
    if family == "gpt-oss":
        found["post_attention_norm.weight"] = found.pop("ffn_norm.weight")
        found |= {"attn_output.bias": (HIDDEN,), "attn_sinks.weight": (HEADS,)}
    if family == "minimax-m2":
        found |= {"attn_q_norm.weight": (width,), "attn_k_norm.weight": (keys,)}
    for name, rows in (("q", width), ("k", keys), ("v", keys)):
        found[f"attn_{name}.weight"] = (rows, HIDDEN)
        if family.startswith(("qwen2", "gpt-oss")):
            found[f"attn_{name}.bias"] = (rows,)
    if family.startswith(("qwen3", "gemma3")):
        found |= {"attn_q_norm.weight": (SIZE,), "attn_k_norm.weight": (SIZE,)}
    return found


def _feed_forward(family: str) -> dict[str, tuple[int, ...]]:
    inward, outward = (FEED, HIDDEN), (HIDDEN, FEED)
    if family == "phi3":
        return {"ffn_up.weight": (2 * FEED, HIDDEN), "ffn_down.weight": outward}
    parts = {"ffn_gate": inward, "ffn_up": inward, "ffn_down": outward}
    if family not in MIXTURES:
        return {f"{name}.weight": shape for name, shape in parts.items()}
    found: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (EXPERTS, HIDDEN)}
    found |= {f"{name}_exps.weight": (EXPERTS, *shape) for name, shape in parts.items()}
    if family == "gpt-oss":
        found["ffn_gate_inp.bias"] = (EXPERTS,)
        found |= {f"{name}_exps.bias": (EXPERTS, shape[0]) for name, shape in parts.items()}
    if family == "minimax-m2":
        found["exp_probs_b.bias"] = (EXPERTS,)
    if family == "qwen2moe":
        found["ffn_gate_inp_shexp.weight"] = (HIDDEN,)
        found |= {f"{name}_shexp.weight": shape for name, shape in parts.items()}
    return found


def _packed(values: np.ndarray[Any, Any], kind: str, source: np.random.Generator) -> Any:
    """``values`` in the type ``kind``, or any values of a type that the package cannot write."""
    if kind not in _SCALES:
        return quants.quantize(values, GGMLQuantizationType[kind])
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = values.shape[-1] // block
    blocks = source.integers(0, 256, (*values.shape[:-1], count, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = source.uniform(0.5e-3, 2e-3, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], count * size)


def write(
    file: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    tied: bool = False,
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    parts: int = 1,
    pieces: bool = False,
) -> None:
    """Write a model of ``family`` whose matrices have the type ``kind``.

    Mistral's is llama's, by another name. ``kinds``: other types, by the name of a matrix in its
    layer. ``more``: of the metadata. ``extra``: further tensors. ``parts``: files it is split into.
    ``pieces``: its tokenizer is one of SentencePiece.
    """
    source = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    types: dict[str, GGMLQuantizationType] = {}
    if family == "mistral":
        family, more = "llama", {"general.name": "mistral", **(more or {})}
    for name, shape in shapes(family, tied=tied).items():
        tensors[name] = source.normal(0, 0.08, shape).astype(np.float32)
        if len(shape) > 1 and not name.endswith(".bias"):
            own = (kinds or {}).get(name.split(".")[-2], kind)
            tensors[name] = _packed(tensors[name], own, source)
            types[name] = GGMLQuantizationType[own]
    tensors |= extra or {}
    names = list(tensors)
    for part in range(parts):
        name = f"{file.stem}-{part + 1:05}-of-{parts:05}.gguf" if parts > 1 else file.name
        writer = GGUFWriter(str(file.with_name(name)), family)
        if part == 0:
            _write_facts(writer, family)
            (_write_pieces if pieces else _write_bytes)(writer)
            for key, value in (more or {}).items():
                _write_value(writer, key, value)
        for tensor in names[part::parts]:
            raw = types.get(tensor) if tensors[tensor].dtype == np.uint8 else None
            writer.add_tensor(tensor, tensors[tensor], raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _write_facts(writer: GGUFWriter, family: str) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(vocabulary()[0]))
    if family in ("llama", "phi3"):
        writer.add_rope_dimension_count(SIZE)
    else:
        writer.add_key_length(SIZE)
        writer.add_value_length(SIZE)
    if family == "minimax-m2":
        writer.add_rope_dimension_count(SIZE // 2)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if family == "gpt-oss":
        writer.add_sliding_window(16)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(16)
    if family in MIXTURES:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(FEED)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(FEED)


def _write_bytes(writer: GGUFWriter) -> None:
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if token in ("<s>", "</s>", "<pad>") else 1 for token in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)


def _write_pieces(writer: GGUFWriter) -> None:
    """A vocabulary of SentencePiece with bytes, whose merges are those of its pieces' scores."""
    pieces = ["▁", *"helo", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [f"<spare_{at}>" for at in range(len(vocabulary()[0]) - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def _write_value(writer: GGUFWriter, key: str, value: float | str) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
