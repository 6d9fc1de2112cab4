"""A short path through the library's plain decoder layers, bit for bit what they compute.

A small model's pass is mostly the library's own Python: module calls, views, a dozen small
operations for a norm and a rotation. Here a layer is the operations alone. Only families whose
layer is norm, attention, norm, gated feed-forward part, each with a residual sum, have this path.
It is used only where a test at start shows it equal to the library's layers; a layer that others
watch by hooks is run by the library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.model.attention import EXACT, EXACT_DEVICES, exact_attention
from flowspec.model.kv import TreeCache, TreeCacheLayer
from flowspec.model.linear import KernelLinear

#: The environment variable with which a user turns the short path off, and its values.
VARIABLE = "FLOWSPEC_LAYERS"
LEAN = "lean"
LIBRARY = "library"
#: Layers of this shape, by the library's class names.
LAYERS = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)
#: Rows of the passes that are compared at start: a prompt, a lone row, a tree.
_TESTED = (5, 1, 16)
_SEED = 9

Rows = Callable[[torch.Tensor], torch.Tensor]


class LeanLayer:
    """One decoder layer, ``layer`` of the library's."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self.watched = layer
        self._norms = (norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm))
        self._q = product_of(attention.q_proj)
        self._k = product_of(attention.k_proj)
        self._v = product_of(attention.v_proj)
        self._o = product_of(attention.o_proj)
        self._q_norm: Rows | None = getattr(attention, "q_norm", None)
        self._k_norm: Rows | None = getattr(attention, "k_norm", None)
        self._head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._gate = product_of(mlp.gate_proj)
        self._up = product_of(mlp.up_proj)
        self._down = product_of(mlp.down_proj)
        self._activate: Rows = mlp.act_fn

    def run(
        self,
        hidden: torch.Tensor,
        cache: TreeCacheLayer,
        turn: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """``hidden``, ``[rows, hidden]``, after this layer; the rows' keys and values are kept.

        ``turn``: cosines and signed sines, ``[rows, 1, head_dim]``. ``bias``: as ``bias_of``'s,
        ``[1, 1, shared x rows, slots]``.
        """
        before, between = self._norms
        hidden = hidden + self._o(self._attend(before(hidden), cache, turn, bias))
        entering = between(hidden)
        return hidden + self._down(self._activate(self._gate(entering)) * self._up(entering))

    def _attend(
        self,
        rows: torch.Tensor,
        cache: TreeCacheLayer,
        turn: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of ``rows`` to the kept ones, ``[rows, heads x head_dim]``."""
        count = rows.shape[0]
        shape = (count, -1, self._head_dim)
        queries = self._q(rows).view(shape)
        keys = self._k(rows).view(shape)
        values = self._v(rows).view(shape)
        if self._q_norm is not None and self._k_norm is not None:
            queries, keys = self._q_norm(queries), self._k_norm(keys)
        kept_keys, kept_values = cache.update(
            turned(keys, turn).transpose(0, 1)[None], values.transpose(0, 1)[None]
        )
        asking = turned(queries, turn).transpose(0, 1)[None]
        found, _ = exact_attention(None, asking, kept_keys, kept_values, bias, scaling=self._scale)
        return found.reshape(count, -1)


class LeanLayers:
    """All layers of ``body``, a decoder of the library's without its head."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self._layers = [LeanLayer(layer) for layer in body.layers]
        self._norm: Rows = norm_of(body.norm)

    def run(self, inputs: dict[str, Any], mask: torch.Tensor, cache: TreeCache) -> torch.Tensor:
        """The rows after the final norm, ``[rows, hidden]``.

        ``inputs``: ``input_ids`` or ``inputs_embeds`` of one sequence, and its ``position_ids``.
        """
        given = inputs.get("inputs_embeds")
        embedded = self._body.embed_tokens(inputs["input_ids"]) if given is None else given
        positions = inputs["position_ids"]
        found = self._body.rotary_emb(embedded, position_ids=positions)
        turn = signed(*found)
        hidden = embedded[0]
        for layer, rows in zip(self._layers, cache.layers, strict=True):
            if layer.watched._forward_pre_hooks:
                hidden = self._by_library(layer, hidden, mask, cache, positions, found)
            else:
                assert isinstance(rows, TreeCacheLayer)
                hidden = layer.run(hidden, rows, turn, mask)
        if self._body.norm._forward_pre_hooks:
            return torch.as_tensor(self._body.norm(hidden[None])[0])
        return self._norm(hidden)

    def _by_library(
        self,
        layer: LeanLayer,
        hidden: torch.Tensor,
        mask: torch.Tensor,
        cache: TreeCache,
        positions: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        after: torch.Tensor = layer.watched(
            hidden[None],
            attention_mask=mask,
            position_embeddings=found,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return after[0]


def signed(cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's cosines and sines, ``[1, rows, head_dim]``, as ``turned`` takes them.

    The first half of the sines is negated instead of the rows' half that they are multiplied by.
    """
    half = sines.shape[-1] // 2
    negated = torch.cat((-sines[0, :, :half], sines[0, :, half:]), dim=-1)
    return cosines[0].unsqueeze(1), negated.unsqueeze(1)


def turned(rows: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """``rows``, ``[rows, heads, head_dim]``, rotated by their positions."""
    cosines, sines = turn
    half = rows.shape[-1] // 2
    swapped = torch.cat((rows[..., half:], rows[..., :half]), dim=-1)
    return rows * cosines + swapped * sines


def product_of(linear: Any) -> Rows:
    """The product of a linear layer over rows ``[rows, inputs]``, without a module's call."""
    if isinstance(linear, KernelLinear):
        return linear.multiply
    plain: Rows = linear
    return plain


def norm_of(norm: Any) -> Rows:
    """The library's root-mean-square norm as one operation where that gives the same bits.

    A block in the middle of the model has no norm at its end, and none is put in.
    """
    if isinstance(norm, torch.nn.Identity):
        return norm
    weight = norm.weight
    epsilon = float(norm.variance_epsilon)

    def fused(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, epsilon)

    source = torch.Generator().manual_seed(_SEED)
    rows = torch.randn((64, weight.shape[0]), generator=source)
    rows = rows.to(device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        equal = all(torch.equal(fused(rows[:count]), norm(rows[:count])) for count in (1, 7, 64))
    return fused if equal else norm


def lean_layers(block: Any) -> LeanLayers | None:
    """The short path of ``block``, a ``LayerBlock``; None: there is none, or it is not equal."""
    config = block.config
    kinds = {type(layer).__name__ for layer in block.body.layers}
    plain = config._attn_implementation == EXACT and block.device.type in EXACT_DEVICES
    if wanted() == LIBRARY or not kinds or not kinds <= LAYERS or not plain or _windowed(config):
        return None
    lean = LeanLayers(block.body)
    return lean if _equal(block, lean) else None


def wanted() -> str:
    """Which path the environment asks for; ConfigError for an unknown one."""
    found = os.environ.get(VARIABLE, LEAN)
    if found not in (LEAN, LIBRARY):
        raise ConfigError(f"{VARIABLE} is {found!r}; expected {LEAN} or {LIBRARY}")
    return found


def _windowed(config: Any) -> bool:
    """Whether any layer attends to a window only."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _equal(block: Any, lean: LeanLayers) -> bool:
    """Whether both paths give the same rows, and keep the same, over passes of several sizes."""
    source = torch.Generator().manual_seed(_SEED)
    capacity = sum(_TESTED)
    caches = (block.new_cache(capacity), block.new_cache(capacity))
    begin = 0
    for count in _TESTED:
        rows = torch.randn((count, block.config.hidden_size), generator=source)
        ids = tuple(range(begin, begin + count))
        parents = tuple(node - 1 for node in ids)
        part = Part(RunKey("test", 1), 0, ids, parents, ids, (), tuple(range(count)), count)
        found = []
        for cache, path in zip(caches, (None, lean), strict=True):
            block.lean = path
            found.append(block.run(part, rows.numpy(), cache))
        begin += count
        if not torch.equal(*found):
            return False
    return bool(torch.equal(*(cache.storage[..., :begin, :] for cache in caches)))
