"""Convert a Llama model directory to a float32 GGUF file, the format of llama.cpp.

    python -m ops.peer.convert MODEL FILE.gguf

Uses the ``gguf`` package. llama.cpp's rotary embedding rotates adjacent values of a head, Hugging
Face's the two halves, so the rows of the query and key projections are permuted.
"""

from __future__ import annotations

import json
import site
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.errors import FlowSpecError, ModelError, installs
from flowspec.model.weights.directory import ModelDirectory, open_directory

#: Token types of ``gguf``.
NORMAL = 1
CONTROL = 3
#: GGUF name of each tensor of a layer: Hugging Face name after ``model.layers.N.``.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_FLOATS = {"F16": "<f2", "F32": "<f4"}

Floats = npt.NDArray[np.float32]


def check(directory: ModelDirectory) -> None:
    """ModelError unless the model is a plain Llama with a byte-level BPE tokenizer."""
    config = directory.config
    tokenizer = _tokenizer(directory)
    rope = config.get("rope_parameters") or {}
    unfit = [
        reason
        for fits, reason in (
            (
                config["model_type"] == "llama",
                f"its model_type is {config['model_type']!r}, not 'llama'",
            ),
            (
                not config.get("attention_bias") and not config.get("mlp_bias"),
                "its layers have biases",
            ),
            (
                rope.get("rope_type", "default") == "default",
                f"its rope_type is {rope.get('rope_type')!r}",
            ),
            (not config.get("rope_scaling"), "it scales its rotary positions"),
            (
                config.get("hidden_act") == "silu",
                f"its activation is {config.get('hidden_act')!r}, not 'silu'",
            ),
            (tokenizer["model"]["type"] == "BPE", "its tokenizer is no BPE"),
            (
                (tokenizer.get("pre_tokenizer") or {}).get("type") == "ByteLevel",
                "its tokenizer is not byte-level",
            ),
        )
        if not fits
    ]
    if unfit:
        raise ModelError(
            f"{directory.path} cannot be converted: {unfit[0]}; expected a plain Llama model"
        )


def interleaved(weight: Floats, heads: int) -> Floats:
    """A query or key projection ``[heads * size, hidden]``, each head's two halves interleaved."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors(directory: ModelDirectory) -> Iterator[tuple[str, Floats]]:
    """GGUF name and values of every tensor; a tied LM head has none."""
    config = directory.config
    queries = int(config["num_attention_heads"])
    heads = {"attn_q": queries, "attn_k": int(config.get("num_key_value_heads", queries))}
    ends = _ENDS if directory.tied else {**_ENDS, "output": "lm_head"}
    for name, source in ends.items():
        yield f"{name}.weight", read(directory, f"{source}.weight")
    for layer in range(directory.layers):
        for name, source in LAYER.items():
            weight = read(directory, f"model.layers.{layer}.{source}.weight")
            yield (
                f"blk.{layer}.{name}.weight",
                interleaved(weight, heads[name]) if name in heads else weight,
            )


def settings(directory: ModelDirectory) -> dict[str, Any]:
    """The model's settings, by the writer method that takes each."""
    config = directory.config
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or directory.hidden_size // heads)
    rope = config.get("rope_parameters") or config
    return {
        "add_context_length": directory.context,
        "add_embedding_length": directory.hidden_size,
        "add_block_count": directory.layers,
        "add_feed_forward_length": int(config["intermediate_size"]),
        "add_head_count": heads,
        "add_head_count_kv": int(config.get("num_key_value_heads", heads)),
        "add_key_length": size,
        "add_value_length": size,
        "add_layer_norm_rms_eps": float(config["rms_norm_eps"]),
        "add_rope_freq_base": float(rope.get("rope_theta", 10000.0)),
        "add_rope_dimension_count": size,
        "add_vocab_size": directory.vocabulary,
        "add_file_type": 0,
    }


def vocabulary(directory: ModelDirectory) -> dict[str, Any]:
    """The tokenizer's tables, by the writer method that takes each."""
    tokenizer = _tokenizer(directory)
    special = {
        int(token["id"]): token["content"]
        for token in tokenizer["added_tokens"]
        if token["special"]
    }
    ids = {int(number): text for text, number in tokenizer["model"]["vocab"].items()} | special
    if sorted(ids) != list(range(directory.vocabulary)):
        raise ModelError(
            f"{directory.path}: the tokenizer's ids are not 0 to {directory.vocabulary - 1}"
        )
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    (eos, *_) = sorted(directory.eos)
    bos = directory.config.get("bos_token_id")
    return {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": "gpt-2",
        "add_token_list": [ids[number] for number in range(directory.vocabulary)],
        "add_token_types": [
            CONTROL if number in special else NORMAL for number in range(directory.vocabulary)
        ],
        "add_token_merges": merges,
        "add_eos_token_id": eos,
        "add_add_bos_token": bos is not None,
        **({"add_bos_token_id": int(bos)} if bos is not None else {}),
    }


def convert(directory: ModelDirectory, file: Path, packages: Path | None = None) -> None:
    """Write ``directory`` to ``file`` atomically.

    ``packages``: a folder that contains ``gguf``. ModelError if the model is not supported or
    ``gguf`` is missing.
    """
    check(directory)
    if packages is not None:
        site.addsitedir(str(packages))
    try:
        from gguf import GGUFWriter
    except ImportError:
        raise ModelError(
            f"the package gguf is not installed; run `make peer`, or `{installs('gguf')}`"
        ) from None
    partial = file.with_name(file.name + ".partial")
    writer = GGUFWriter(partial, "llama")
    for method, value in {**settings(directory), **vocabulary(directory)}.items():
        getattr(writer, method)(value)
    for name, values in tensors(directory):
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def read(directory: ModelDirectory, name: str) -> Floats:
    """The tensor ``name`` in float32."""
    entry = directory.tensor(name)
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        data = file.read(entry.end - entry.start)
    if entry.dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif entry.dtype in _FLOATS:
        values = np.frombuffer(data, _FLOATS[entry.dtype]).astype(np.float32)
    else:
        raise ModelError(
            f"{entry.file}: {name} is of type {entry.dtype}; expected BF16, F16 or F32"
        )
    return values.reshape(entry.shape)


def _tokenizer(directory: ModelDirectory) -> dict[str, Any]:
    if not directory.has("tokenizer.json"):
        raise ModelError(
            f"{directory.path} has no tokenizer.json; only such a tokenizer can be converted"
        )
    loaded: dict[str, Any] = json.loads(
        (directory.path / "tokenizer.json").read_text(encoding="utf-8")
    )
    return loaded


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m ops.peer.convert MODEL FILE.gguf")
    try:
        convert(open_directory(sys.argv[1]), Path(sys.argv[2]))
    except FlowSpecError as error:
        sys.exit(f"convert: {error}")


if __name__ == "__main__":
    main()
