"""Which of the library's plain decoder layers can be run in C, and what they consist of."""

from __future__ import annotations

from typing import Any

import torch

from flowspec.model.kernels.attention import library_for
from flowspec.model.kernels.layers import (
    CompiledLayers,
    CompiledNorm,
    CompiledSilu,
    LayerShape,
    LinearParts,
    PlainLayer,
)
from flowspec.model.layers.joined import JoinedPart
from flowspec.model.layers.linear import KernelLinear

#: Names of the norms of queries and keys, which few families have.
HEAD_NORMS = ("q_norm", "k_norm")


def compiled_layers(body: Any) -> CompiledLayers | None:
    """The layers of ``body`` in C, as its norms and activations are from then on.

    None: not all products of the layers are in C.
    """
    config = body.config
    first = body.layers[0]
    attention = first.self_attn
    weight = first.post_attention_layernorm.weight
    library = library_for(int(attention.head_dim), weight.dtype, weight.device)
    if library is None or config.hidden_act != "silu":
        return None
    found = [_plain(layer) for layer in body.layers]
    if not all(linear.matrices for layer in found for linear in layer.linears):
        return None
    for owner in list(body.modules()):
        for name, module in list(owner.named_children()):
            if type(module).__name__.endswith("RMSNorm"):
                setattr(owner, name, CompiledNorm(library, module))
            elif name == "act_fn":
                owner.act_fn = CompiledSilu(library)
    heads = [module.out_features // attention.head_dim for module in qkv_of(attention)]
    shape = LayerShape(
        hidden=config.hidden_size,
        heads=heads[0],
        key_heads=heads[1],
        head_dim=attention.head_dim,
        scale=attention.scaling,
        epsilon=first.post_attention_layernorm.variance_epsilon,
    )
    return CompiledLayers(library, found, shape, weight.dtype)


def _plain(layer: Any) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, *(getattr(attention, name, None) for name in HEAD_NORMS)]
    before, query, key = (getattr(norm, "weight", None) for norm in norms)
    return PlainLayer(
        before=before,
        between=layer.post_attention_layernorm.weight,
        query=query,
        key=key,
        qkv=_parts(*qkv_of(attention)),
        o=_parts(attention.o_proj),
        gate_up=_parts(mlp.gate_proj, mlp.up_proj),
        down=_parts(mlp.down_proj),
    )


def _parts(*linears: Any) -> LinearParts:
    """Those of ``linears`` side by side; no matrices: they cannot be in C, or not together."""
    first = linears[0]
    own = [first.whole] if isinstance(first, JoinedPart) else linears
    packed = [linear.matrices if isinstance(linear, KernelLinear) else () for linear in own]
    biases = [linear.bias for linear in own if linear.bias is not None]
    if not all(packed) or len(biases) not in (0, len(own)):
        return LinearParts((), None)
    matrices = tuple(matrix for some in packed for matrix in some)
    return LinearParts(matrices, torch.cat(biases) if biases else None)


def qkv_of(attention: Any) -> tuple[Any, ...]:
    """The linear layers of queries, keys and values."""
    return attention.q_proj, attention.k_proj, attention.v_proj
