"""What a GGUF file says of its model: a config, a tokenizer and an index of its tensors.

By the library's own reading of the metadata, as far as it has one. Source: the description of the
format in ggml's repository.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.errors import ModelError, naming_what_is_missing, unusable
from flowspec.model.weights.gguf_rows import CODES_OF, DAMAGED, Floats
from flowspec.model.weights.precision import KEPT, OWN
from flowspec.model.weights.tensor_files import TensorEntry

GGUF_INDEX = "gguf-index.json"
_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")
#: Types that are read, and the names that safetensors have for those of plain numbers.
_PLAIN = ("F32", "F16", "BF16")
#: That for other quantised files: as close to their values as bfloat16, in half the memory.
_CLOSE = "int8-block"
_TYPES = (*_PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
#: Architectures that are read.
_FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"),
    *("qwen2moe", "qwen3moe", "gpt-oss", "minimax-m2"),
)
_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: What families name otherwise than ``_LAYER``.
_OWN = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    "minimax-m2": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
    },
}
#: Tensors whose names in the library end with the module's.
_BARE = ("attn_sinks", "exp_probs_b")
#: An expert's matrices, of which a file has one tensor for all experts; and those of one family.
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OWN_EXPERTS = {
    "minimax-m2": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    }
}
#: Tensors that hold no weights: factors of the rotary embedding's frequencies.
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
#: llama.cpp keeps the two halves of these rows' heads interleaved.
_INTERLEAVED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
#: Sizes that the library passes over, and where its config has them.
_SIZES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
#: Frequencies that Llama 3 divides by its factor, all or in part, and the context it was made for.
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Llama-like models whose query is scaled by other than its head's size, by number of layers.
_SCALED_BY_WIDTH = {"gemma2": (46,), "gemma3": (62,)}
#: How byte-level tokenizers split texts before they merge bytes: those that the library knows, and
#: GPT-2's, which it takes for all others. SmolLM's is GPT-2's behind a split at every digit.
_SPLITS = frozenset(
    [
        *("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        *("dbrx", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "megrez", "gpt-4o", "llama4"),
    ]
)

#: What pieces have for a space.
_SPACE = "\u2581"
#: Families that the library reads a tokenizer of SentencePiece for.
_OF_PIECES = ("llama", "gemma2", "gemma3", "phi3")


def describe(files: Sequence[Path], folder: Path) -> None:
    """Write config, tokenizer and index of the model in ``files`` into ``folder``."""
    with naming_what_is_missing():
        from gguf import GGUFReader
    try:
        readers = [GGUFReader(part) for part in files]
    except PermissionError as error:
        raise ModelError(unusable(error)) from None
    except Exception:  # noqa: BLE001 - whatever a damaged file makes of the reader
        sizes = " and ".join(f"{file.name} of {file.stat().st_size} bytes" for file in files)
        raise ModelError(
            f"{files[0]} cannot be read as GGUF, {sizes} is damaged or cut short; {DAMAGED}"
        ) from None
    facts = _Facts(readers[0], files[0])
    index = _index(readers, files, facts)
    with _for_library(files[0], facts) as source:
        config = _config(source, files[0], facts, readers, index)
        _write_tokenizer(source, files[0], facts, folder)
    _write(folder / "config.json", config)
    ends = [facts.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    _write(folder / "generation_config.json", {"eos_token_id": [e for e in ends if e is not None]})
    _write(folder / GGUF_INDEX, {name: _noted(entry) for name, entry in index.items()})


def _line(error: Exception) -> str:
    """``error`` on one line, and not long."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _noted(entry: TensorEntry) -> dict[str, object]:
    return {**asdict(entry), "file": str(entry.file)}


class _Facts:
    """The metadata of a file."""

    def __init__(self, reader: Any, file: Path) -> None:
        self.fields = reader.fields
        self.family = str(self.value("general.architecture") or "")
        mixture = self.family == "llama" and self.own("expert_count", 0)
        if mixture or self.family not in _FAMILIES:
            kind = "a mixture of llama's" if mixture else repr(self.family)
            raise ModelError(
                f"{file} holds {kind} architecture; of GGUF files {', '.join(_FAMILIES)} are "
                "read, take the model's safetensors"
            )

    def value(self, name: str, default: Any = None) -> Any:
        """The value ``name``; ``default`` if there is none."""
        field = self.fields.get(name)
        return default if field is None else field.contents()

    def own(self, name: str, default: Any = None) -> Any:
        """The value ``name`` of the architecture."""
        return self.value(f"{self.family}.{name}", default)


@contextmanager
def _for_library(file: Path, facts: _Facts) -> Iterator[Path]:
    """The file whose metadata the library reads: ``file``, or a copy that it does not fail on.

    It takes the names of gpt-oss' scaling, which ``_scale_rope`` reads, for their values.
    """
    if facts.family != "gpt-oss":
        yield file
        return
    from gguf import GGUFValueType, GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        writer = GGUFWriter(str(copy), facts.family)
        for name, field in facts.fields.items():
            if name.startswith("GGUF.") or name in writer.kv_data[0] or ".rope.scaling." in name:
                continue
            kind = field.types[0]
            of_items = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, of_items)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        yield copy


def _index(readers: Sequence[Any], files: Sequence[Path], facts: _Facts) -> dict[str, TensorEntry]:
    """The tensors by the names that the library has for them."""
    found: dict[str, TensorEntry] = {}
    for reader, file in zip(readers, files, strict=True):
        size = file.stat().st_size
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name
            start = int(tensor.data_offset)
            end = start + int(tensor.n_bytes)
            if kind not in _TYPES:
                raise ModelError(
                    f"{file}: tensor {tensor.name} has type {kind}; of GGUF files "
                    f"{', '.join(_TYPES)} are read"
                )
            if end > size:
                raise ModelError(f"{file} is cut short: {size} bytes of {end}; {DAMAGED}")
            shape = tuple(int(extent) for extent in reversed(tensor.shape))
            found.update(_named(tensor.name, TensorEntry(file, start, end, kind, shape), facts))
    return found


def _named(name: str, entry: TensorEntry, facts: _Facts) -> dict[str, TensorEntry]:
    """The tensor ``name`` of a file, by the library's name; an expert's matrices one by one."""
    if name in _ROPE:
        return {}
    module, _, leaf = name.rpartition(".")
    if module in _ENDS:
        module = _ENDS[module]
        return {f"{module}.{leaf}": _adjusted(module, entry, facts)}
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    names = {**_LAYER, **_OWN.get(facts.family, {})}
    if layer is not None and layer[2] in _EXPERTS:
        expert = _OWN_EXPERTS.get(facts.family, _EXPERTS)[layer[2]]
        count, *shape = entry.shape
        size = (entry.end - entry.start) // count
        return {
            f"model.layers.{layer[1]}.{expert.format(at)}.{leaf}": replace(
                entry,
                start=entry.start + at * size,
                end=entry.start + (at + 1) * size,
                shape=tuple(shape),
            )
            for at in range(count)
        }
    if layer is None or layer[2] not in names:
        raise ModelError(f"{entry.file}: tensor {name} is not one of a {facts.family} model's")
    module = f"model.layers.{layer[1]}.{names[layer[2]]}"
    if layer[2] in _BARE:
        return {module: entry}
    if layer[2] == "ffn_gate_inp_shexp" and len(entry.shape) == 1:
        return {f"{module}.{leaf}": replace(entry, shape=(1, *entry.shape))}
    if facts.family == "llama" and layer[2] in _INTERLEAVED:
        heads = int(facts.own(_INTERLEAVED[layer[2]], facts.own("attention.head_count")))
        return {f"{module}.{leaf}": replace(entry, heads=heads)}
    return {f"{module}.{leaf}": _adjusted(module, entry, facts)}


def _adjusted(module: str, entry: TensorEntry, facts: _Facts) -> TensorEntry:
    """``entry`` with what is to be added to its values: Gemma's norms are stored with 1 more."""
    plus_one = facts.family.startswith("gemma") and module.endswith("norm")
    return replace(entry, add=-1.0) if plus_one else entry


def _config(
    source: Path,
    file: Path,
    facts: _Facts,
    readers: Sequence[Any],
    index: Mapping[str, TensorEntry],
) -> dict[str, Any]:
    """The config of ``file`` as the library reads it from ``source``, with what it leaves out."""
    with naming_what_is_missing():
        from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
        found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    except Exception as error:  # noqa: BLE001 - the library has no error of its own here
        raise ModelError(f"{file}: its metadata describes no model: {_line(error)}") from None
    for name, key in _SIZES.items():
        if key in found and (size := facts.own(name)) is not None:
            found[key] = int(size)
    if found["model_type"] == "mistral" and facts.own("attention.sliding_window") is None:
        found["sliding_window"] = None  # the library's default is that of the first Mistral alone
    if int(found["num_hidden_layers"]) in _SCALED_BY_WIDTH.get(facts.family, ()):
        found["query_pre_attn_scalar"] = found["hidden_size"] // found["num_attention_heads"]
    found["tie_word_embeddings"] = "lm_head.weight" not in index
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        found.pop(name, None)
    _scale_rope(found, facts, _rope_tensors(readers), file)
    kinds = Counter(entry.dtype for entry in index.values() if len(entry.shape) > 1)
    common = kinds.most_common(1)[0][0] if kinds else "F32"
    found["dtype"] = {"F32": "float32", "F16": "float16"}.get(common, "bfloat16")
    found["gguf_types"] = dict(sorted(kinds.items()))
    layers = {entry.dtype for name, entry in index.items() if _is_matrix_of_layer(name, entry)}
    kept = next((name for name, types in CODES_OF.items() if layers <= types), None)
    if layers.isdisjoint(_PLAIN):
        found[OWN] = kept or _CLOSE
    found[KEPT] = kept
    return found


def _is_matrix_of_layer(name: str, entry: TensorEntry) -> bool:
    """Whether it is one of the matrices that a precision is for; routers are not."""
    is_router = name.endswith(("gate.weight", "router.weight"))
    return ".layers." in name and len(entry.shape) > 1 and not is_router


def _rope_tensors(readers: Sequence[Any]) -> dict[str, Floats]:
    return {
        tensor.name: np.array(tensor.data, dtype=np.float32)
        for reader in readers
        for tensor in reader.tensors
        if tensor.name in _ROPE
    }


def _scale_rope(
    config: dict[str, Any], facts: _Facts, tensors: Mapping[str, Floats], file: Path
) -> None:
    """Give the rotary embedding the scaling that the file asks for, which the library passes over.

    ModelError for one that cannot be told.
    """
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    kind = facts.own("rope.scaling.type")
    factor = facts.own("rope.scaling.factor") or facts.own("rope.scale_linear")
    original = facts.own("rope.scaling.original_context_length")
    if "rope_freqs.weight" in tensors:
        rope |= _llama_3(tensors["rope_freqs.weight"], float(rope["rope_theta"]), file)
    elif "rope_factors_long.weight" in tensors:
        short = int(original or config["max_position_embeddings"])
        rope |= {
            "rope_type": "longrope",
            "factor": config["max_position_embeddings"] / short,
            "long_factor": tensors["rope_factors_long.weight"].tolist(),
            "short_factor": tensors["rope_factors_short.weight"].tolist(),
            "original_max_position_embeddings": short,
        }
        config["original_max_position_embeddings"] = short
    elif kind in ("linear", "yarn") and factor:
        rope |= {"rope_type": kind, "factor": float(factor)}
        if original:
            rope["original_max_position_embeddings"] = int(original)
    elif kind not in (None, "none") and factor not in (None, 1.0):
        raise ModelError(f"{file}: its rope.scaling.type is {kind!r}; expected linear or yarn")


def _llama_3(factors: Floats, theta: float, file: Path) -> dict[str, Any]:
    """The parameters of Llama 3's scaling by which frequencies are divided by ``factors``."""
    factor = round(float(factors.max()), 3)
    count = len(factors)
    length = 2 * math.pi * theta ** (np.arange(count, dtype=np.float64) / count)
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    old = _LLAMA_3["original_max_position_embeddings"]
    smooth = np.clip((old / length - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise ModelError(
            f"{file}: its rope_freqs are not Llama 3's, and no others are known; take the model's "
            "safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA_3}


def _write_tokenizer(source: Path, file: Path, facts: _Facts, folder: Path) -> None:
    from tokenizers import decoders, normalizers
    from tokenizers import pre_tokenizers as steps
    from transformers import AutoTokenizer

    kind = facts.value("tokenizer.ggml.model")
    if kind == "llama" and facts.family not in _OF_PIECES:
        raise ModelError(
            f"{file}: its tokenizer is one of SentencePiece, which no {facts.family} model has; "
            "take the model's safetensors"
        )
    split = facts.value("tokenizer.ggml.pre") or "default"
    if kind == "gpt2" and split not in _SPLITS:
        raise ModelError(
            f"{file}: its tokenizer splits texts as {split!r} does, which is not known here; take "
            "the model's safetensors"
        )
    try:
        found = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except Exception as error:  # noqa: BLE001 - the library has no error of its own here
        raise ModelError(f"{file}: its tokenizer cannot be read: {_line(error)}") from None
    if split == "smollm":
        backend = found.backend_tokenizer
        backend.pre_tokenizer = steps.Sequence([steps.Digits(True), backend.pre_tokenizer])
    if kind == "llama" and not facts.value("tokenizer.ggml.add_space_prefix", True):
        backend = found.backend_tokenizer
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = None
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    try:
        found.save_pretrained(folder)
    except Exception as error:
        code = _OF_SYSTEM.search(str(error))  # the package of tokenizers has no type of its own
        if isinstance(error, OSError) or code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
    _drop_strangers(folder, frozenset(facts.value("tokenizer.ggml.tokens") or ()))


def _drop_strangers(folder: Path, tokens: frozenset[str]) -> None:
    """Remove what the library's class has by default and the file has not: no row is theirs."""
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text(encoding="utf-8"))
    known["added_tokens"] = [one for one in known["added_tokens"] if one["content"] in tokens]
    _write(file, known)
    file = folder / "tokenizer_config.json"
    known = json.loads(file.read_text(encoding="utf-8"))
    strangers = [
        key
        for key, value in known.items()
        if key.endswith("_token") and isinstance(value, str) and value not in tokens
    ]
    _write(file, {key: value for key, value in known.items() if key not in strangers})
