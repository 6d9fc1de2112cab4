"""A short path through the library's plain decoder layers: the bits that they compute.

A small model's pass is mostly the library's own Python: module calls, views, a dozen small
operations for a norm and a rotation. Here a layer is the operations alone. Only families whose
layer is norm, attention, norm, gated feed-forward part, each with a residual sum, have this path.
It is used only where a test at start shows it equal to the library's layers. Where all products of
the layers are in C, the layers are, in one call, and the norms and activations of the library's
layers become those of C. The attention in C sums in another order in float64, so a tie of the
rounding may fall otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.model.kernels.attention import exact_attention_for
from flowspec.model.kernels.layers import CompiledNorm, Decode
from flowspec.model.layers.in_c import HEAD_NORMS, compiled_layers, qkv_of
from flowspec.model.layers.joined import JoinedPart
from flowspec.model.layers.linear import KernelLinear
from flowspec.model.rows.arrays import taken
from flowspec.model.rows.attention import EXACT, EXACT_DEVICES, weighted
from flowspec.model.rows.kv import Slots
from flowspec.model.rows.paged import RowCache

#: The environment variable with which a user turns the short path off, and its values.
VARIABLE = "FLOWSPEC_LAYERS"
LEAN = "lean"
LIBRARY = "library"
#: The name of the short path whose layers are in C.
COMPILED = "compiled"
#: Layers of this shape, by the library's class names.
LAYERS = frozenset(
    {
        *("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        "Eagle3Layer",
    }
)
#: Rows of the passes that are compared at start: a prompt, a lone row, a tree.
TESTED = (5, 1, 16)
_SEED = 9
#: Kinds of rotary embeddings whose angles depend on the longest position of a pass.
_CHANGING = ("dynamic", "longrope")
#: Least positions for which cosines and sines are computed at once.
_LEAST_TURNS = 256

Rows = Callable[[torch.Tensor], torch.Tensor]
#: What is called in a pass with the rows into a layer, ``[rows, hidden]``, by the layer's number in
#: the block; the number after the last layer's stands for the final norm.
Readers = Mapping[int, Callable[[torch.Tensor], None]]


class LeanLayer:
    """One decoder layer, ``layer`` of the library's; its attention ``compiled`` if it can be."""

    def __init__(self, layer: Any, compiled: bool) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self._norms = (norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm))
        self._size = int(attention.head_dim)
        heads = [linear.out_features // self._size for linear in qkv_of(attention)]
        self._heads = heads[0]
        self._turning = heads[0] + heads[1]  # query and key heads
        self._qkv = joined_product_of(*qkv_of(attention))
        self._o = product_of(attention.o_proj)
        norms: list[Rows | None] = [getattr(attention, name, None) for name in HEAD_NORMS]
        self._q_norm, self._k_norm = norms
        self._scale = float(attention.scaling)
        self._gate_up = products_of(mlp.gate_proj, mlp.up_proj)
        self._down = product_of(mlp.down_proj)
        weight = layer.post_attention_layernorm.weight
        kind = self._size, weight.dtype, weight.device
        self._exact = exact_attention_for(*kind) if compiled else None
        self._activate: Rows = mlp.act_fn

    def run(
        self,
        hidden: torch.Tensor,
        slots: Sequence[Slots],
        turn: torch.Tensor,
        biases: Sequence[torch.Tensor],
        entering: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``hidden``, ``[rows, hidden]``, after this layer; the rows' keys and values are kept.

        ``slots``: of each job whose rows these are, one's behind another's. ``turn``: as
        ``Turns.at``'s. ``biases``: as ``bias_of``'s, ``[1, 1, shared x rows, slots]``, of each job.
        ``entering``: what the attention reads in place of the norm of ``hidden``.
        A lone row may come as two equal ones, of which one has keys, values and attention.
        """
        before, between = self._norms
        entering = before(hidden) if entering is None else entering
        hidden = hidden + self._o(self._attend(entering, slots, turn, biases))
        gate, up = self._gate_up(between(hidden))
        return hidden + self._down(self._activate(gate) * up)

    def _attend(
        self,
        rows: torch.Tensor,
        slots: Sequence[Slots],
        turn: torch.Tensor,
        biases: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Attention of ``rows`` to the kept ones, ``[rows, heads x head_dim]``."""
        count = turn.shape[0]
        heads, turning = self._heads_of(rows, count, turn)
        new = turning[self._heads :], heads[:, self._turning :].transpose(0, 1)
        queries = turning[: self._heads]
        found = rows.new_empty((rows.shape[0], self._heads, self._size))
        begin = 0
        for own, bias in zip(slots, biases, strict=True):
            end = begin + own.added
            own.write(*(part[:, begin:end] for part in new))
            part = queries[:, begin:end]
            if self._exact is not None:
                self._exact.into(found[begin:end], part, own.kept, bias[0], self._scale)
            else:
                found[begin:end].copy_(attend(part, own, bias[0], self._scale))
            begin = end
        if len(found) > count:
            found[1].copy_(found[0])
        return found.view(rows.shape[0], -1)

    def _heads_of(
        self, rows: torch.Tensor, count: int, turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the first ``count`` rows, ``[rows, heads, head_dim]``.

        And the queries and keys of these, rotated, ``[heads, rows, head_dim]``.
        """
        heads = self._qkv(rows)[:count].view(count, -1, self._size)
        turning = heads[:, : self._turning]
        if self._q_norm is not None and self._k_norm is not None:
            parts = turning[:, : self._heads], turning[:, self._heads :]
            turning = torch.cat((self._q_norm(parts[0]), self._k_norm(parts[1])), dim=1)
        return heads, turned(turning, turn).transpose(0, 1)


class LeanLayers:
    """All layers of ``body``, a decoder of the library's.

    ``head``: rows after the final norm to logits, ``[rows, vocabulary]``; None: the block has no
    head, or one that does more than a product.
    """

    def __init__(self, body: Any, head: Rows | None = None, *, compiled: bool = True) -> None:
        self.head = head
        self._compiled = compiled_layers(body) if compiled else None
        self._layers: list[LeanLayer] = []
        if self._compiled is None:
            self._layers = [LeanLayer(layer, compiled) for layer in body.layers]
        self._count = len(body.layers)
        self._norm: Rows = norm_of(body.norm)
        self._turns = Turns(body.rotary_emb)
        self.name = LEAN if self._compiled is None else COMPILED
        linears = [module for module in body.layers.modules() if isinstance(module, KernelLinear)]
        # A lone row goes through all layers as two, not repeated by every kernel.
        self._pairs = bool(linears) and all(linear.pads for linear in linears)

    def run(
        self,
        embedded: torch.Tensor,
        positions: Sequence[int],
        counts: Sequence[int],
        masks: Sequence[torch.Tensor],
        caches: Sequence[RowCache],
        entering: torch.Tensor | None = None,
        readers: Readers | None = None,
    ) -> torch.Tensor:
        """The rows after the final norm, ``[rows, hidden]``.

        ``embedded``: rows into the first layer, ``[rows, hidden]``, at ``positions``; ``counts`` of
        them are of each job, which has a mask and a cache. ``entering``: what the first layer's
        attention reads in place of their norm.
        """
        count = len(positions)
        turn = self._turns.at(positions, embedded)
        hidden = embedded
        if count == 1 and self._pairs:
            hidden = hidden.expand(2, -1).contiguous()
            entering = None if entering is None else entering.expand(2, -1).contiguous()
        slots = [cache.slots(own) for cache, own in zip(caches, counts, strict=True)]
        begin = 0
        readers = readers or {}
        run = self._over(turn, slots, masks)
        for at in sorted({*readers, self._count}):
            if begin < at:
                hidden = run(hidden, range(begin, at), entering)
                entering = None
            if at in readers:
                readers[at](hidden[:count])
            begin = at
        return self._norm(hidden)[:count]

    def _over(
        self, turn: torch.Tensor, slots: Sequence[Slots], biases: Sequence[torch.Tensor]
    ) -> Decode:
        """A pass; ``slots`` of all layers, the rest as ``LeanLayer.run``'s."""
        if self._compiled is not None:
            new, kept = zip(*slots, strict=True)
            return self._compiled.over(turn, new, kept, biases)
        by_job = [own.by_layer() for own in slots]

        def run(hidden: torch.Tensor, layers: range, entering: torch.Tensor | None) -> torch.Tensor:
            for at in layers:
                own_slots = [own[at] for own in by_job]
                hidden = self._layers[at].run(hidden, own_slots, turn, biases, entering)
                entering = None
            return hidden

        return run


class Turns:
    """The cosines and signed sines of ``rotary``, the library's module, by position.

    They are computed once, by the library, as far as texts have come, while a table of them has the
    bits that the library computes for the positions of a pass.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._table: torch.Tensor | None = None
        self._usable = True

    def at(self, positions: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """As ``turned`` takes them, in the type and on the device of ``rows``."""
        end = max(positions) + 1
        if self._usable and (self._table is None or len(self._table) < end):
            self._grow(end, rows)
        if self._table is None:
            return self._computed(torch.tensor(positions, device=rows.device), rows)
        return taken(self._table, positions)

    def _grow(self, end: int, rows: torch.Tensor) -> None:
        size = max(_LEAST_TURNS, 2 * end)
        table = self._computed(torch.arange(size, device=rows.device), rows)
        samples = [range(size - 1, size), range(end - 1, end), range(end), range(size - 16, size)]
        self._usable = all(
            torch.equal(
                self._computed(torch.tensor(sample, device=rows.device), rows),
                table[sample.start : sample.stop],
            )
            for sample in samples
        )
        self._table = table if self._usable else None

    def _computed(self, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return signed(*self._rotary(rows, position_ids=places.unsqueeze(0)))


def attend(queries: torch.Tensor, slots: Slots, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """``exact_attention`` over rows as they lie in a job's cache, before it is rounded.

    Returns ``[rows, heads, head_dim]``. ``queries`` is ``[heads, rows, head_dim]``; ``bias`` is
    ``[1, shared x rows, slots]``.
    """
    heads, count, size = queries.shape
    wide = queries.to(bias.dtype, memory_format=torch.contiguous_format)
    keys, values = slots.wide(bias.dtype)
    found = weighted(wide.view(keys.shape[0], -1, size), keys, values, bias, scale)
    return found.view(heads, count, size).transpose(0, 1)


def signed(cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """The library's cosines and sines, ``[1, rows, head_dim]``, as ``turned`` takes them.

    The first half of the sines is negated instead of the rows' half that they are multiplied by.
    """
    half = sines.shape[-1] // 2
    negated = torch.cat((-sines[0, :, :half], sines[0, :, half:]), dim=-1)
    return torch.stack((cosines[0], negated), dim=1).unsqueeze(2)


def turned(rows: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """``rows``, ``[rows, heads, head_dim]``, rotated by their positions.

    ``turn``: cosines and signed sines, ``[rows, 2, 1, head_dim]``.
    """
    swapped = rows.roll(rows.shape[-1] // 2, -1)
    return rows * turn[:, 0] + swapped * turn[:, 1]


def product_of(linear: Any) -> Rows:
    """The product of a linear layer over rows ``[rows, inputs]``, without a module's call."""
    if isinstance(linear, KernelLinear):
        return linear.multiply
    plain: Rows = linear
    return plain


def products_of(*linears: Any) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """The product of each of ``linears``; a single one where they are a group (``joined``)."""
    first = linears[0]
    if isinstance(first, JoinedPart):
        whole = first.whole.multiply
        columns = [linear.columns for linear in linears]

        def parts(rows: torch.Tensor) -> list[torch.Tensor]:
            found = whole(rows)
            return [found[:, part] for part in columns]

        return parts
    products = [product_of(linear) for linear in linears]
    return lambda rows: [product(rows) for product in products]


def joined_product_of(*linears: Any) -> Rows:
    """The products of ``linears`` side by side."""
    first = linears[0]
    if isinstance(first, JoinedPart):
        return first.whole.multiply
    products = [product_of(linear) for linear in linears]
    return lambda rows: torch.cat([product(rows) for product in products], dim=-1)


def norm_of(norm: Any) -> Rows:
    """The library's root-mean-square norm in fewer operations where that gives the same bits.

    One where its weights are float32; rows of 16 bits are rounded before they are multiplied by
    them. A block in the middle of the model has no norm at its end, and none is put in.
    """
    if isinstance(norm, (torch.nn.Identity, CompiledNorm)):
        return norm.forward
    weight = norm.weight
    epsilon = float(norm.variance_epsilon)

    def fused(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, epsilon)

    size = torch.tensor(float(weight.shape[0]), device=weight.device)
    least = torch.tensor(epsilon, device=weight.device)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        squares = (wide * wide).sum(-1, keepdim=True)
        scaled = wide * torch.addcdiv(least, squares, size).rsqrt_()
        return scaled.to(rows.dtype).mul_(weight)

    source = torch.Generator().manual_seed(_SEED)
    rows = torch.randn((64, weight.shape[0]), generator=source)
    rows = rows.to(device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        for short in (fused, rounded):
            if all(torch.equal(short(rows[:count]), norm(rows[:count])) for count in (1, 7, 64)):
                return short
    whole: Rows = norm
    return whole


def head_of(head: Any, row_type: torch.dtype) -> Rows | None:
    """The product of ``head``, a ``LogitHead``, over rows of ``row_type``; None: it does more."""
    linear = head.causal.lm_head
    product = product_of(linear)
    source = torch.Generator().manual_seed(_SEED)
    rows = torch.randn((5, linear.in_features), generator=source).to(row_type)
    with torch.inference_mode():
        equal = all(torch.equal(product(rows[:count]), head(rows[:count])) for count in (1, 5))
    return product if equal else None


def has_short_path(body: Any, device: torch.device) -> bool:
    """Whether the layers of ``body``, a decoder of the library's, can be run by the short path."""
    config = body.config
    kinds = {type(layer).__name__ for layer in body.layers}
    plain = config._attn_implementation == EXACT and device.type in EXACT_DEVICES
    turning = getattr(body.rotary_emb, "rope_type", None) not in _CHANGING
    plain_layers = bool(kinds) and kinds <= LAYERS and turning
    return wanted() == LEAN and plain_layers and plain and not _windowed(config)


def lean_layers(block: Any) -> LeanLayers | None:
    """The short path of ``block``, which ``has_short_path``; None: it is not equal."""
    head = None if block.head is None else head_of(block.head, block.placing.head_rows)
    return first_equal(block.body, head, partial(_equal, block))


def bias_copies(short: LeanLayers | None, shared: int) -> int:
    """How often a bias for ``short`` has a mask's rows (``bias_of``): layers in C need them once.

    ``shared``: query heads of a key head. None: for the library's layers.
    """
    return 1 if short is not None and short.name == COMPILED else shared


def first_equal(
    body: Any, head: Rows | None, equal: Callable[[LeanLayers], bool]
) -> LeanLayers | None:
    """The short path that is ``equal`` in a trial; None: there is none.

    If a tie fell otherwise there, it is the one without the compiled attention.
    """
    paths = (LeanLayers(body, head, compiled=compiled) for compiled in (True, False))
    return next(filter(equal, paths), None)


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
    capacity = sum(TESTED)
    caches = (block.new_cache(capacity), block.new_cache(capacity))
    begin = 0
    for count in TESTED:
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
