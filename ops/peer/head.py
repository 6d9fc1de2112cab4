"""Convert an EAGLE-3 head to GGUF, for llama.cpp to draft with beside a target in that format.

Its matrices are in Q8_0, what llama.cpp's own converter is asked for; a head here has eight bits a
weight too. Facts and names are those of that converter (``conversion/llama.py``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from flowspec.model.drafters.eagle3_layout import (
    EMBEDDING,
    FC,
    LM_HEAD,
    NORM,
    OFFSETS,
    read_layout,
)
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.tensors import read_integers
from ops.peer.convert import LAYER, interleaved, read, settings

_FAMILY = "eagle3"
_LAYER = {**LAYER, "attn_norm_2": "hidden_norm"}


def convert_head(head: ModelDirectory, target: ModelDirectory, whole: Path, file: Path) -> None:
    """Write the EAGLE-3 ``head`` for ``target`` to ``file``, with the tokenizer of ``whole``.

    ``whole``: the target in GGUF. ModelError if the head is another target's or not known.
    """
    layout = read_layout(head, target)
    writer = GGUFWriter(str(file), _FAMILY)
    for method, value in settings(head).items():
        getattr(writer, method)(value)
    writer.add_array(f"{_FAMILY}.target_layers", list(layout.taps.layers))
    writer.add_uint32(f"{_FAMILY}.target_hidden_size", target.hidden_size)
    writer.add_bool(f"{_FAMILY}.norm_before_residual", layout.normed)
    for name, field in GGUFReader(whole).fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            of_items = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, of_items)
    names = {f"blk.0.{name}": f"{layout.layer}{source}.weight" for name, source in _LAYER.items()}
    names |= {"fc": FC, "output": LM_HEAD, "output_norm": NORM}
    if layout.embeds:
        names["token_embd"] = EMBEDDING
    queries = int(head.config["num_attention_heads"])
    rotated = {"blk.0.attn_q": queries, "blk.0.attn_k": int(head.config["num_key_value_heads"])}
    for name, source in names.items():
        values = read(head, source)
        if name in rotated:
            values = interleaved(values, rotated[name])
        if values.ndim == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quants.quantize(values, kind), raw_dtype=kind)
    if layout.mapped:
        offsets = read_integers(OFFSETS, head.tensor(OFFSETS)).numpy()
        writer.add_tensor(OFFSETS, (offsets + np.arange(len(offsets))).astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
