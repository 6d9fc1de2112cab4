"""PipeDec's two-level KV cache and dynamic tree attention, as an attention path of a stage.

The *model cache* holds the context, which every row attends to; the *tree cache* holds the rows
above it, the only ones with a mask. Rows move to the model cache as they become context. A prompt
row is a tree row during its own pass and context from the next one on. Grouped queries share their
head's keys without copies. Source: PipeDec, two-level KV cache and dynamic tree attention
(docs/algorithms.md#two-level-cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig

from flowspec.core.protocol.work import Part
from flowspec.core.run import limits
from flowspec.errors import ModelError, StateError
from flowspec.model.rows.attention import EXACT, grouped, ungrouped
from flowspec.model.rows.kv import CopiedRows, TreeCache, copies
from flowspec.model.rows.paged import OneLevelCache
from flowspec.model.rows.ragged import RaggedCache
from flowspec.model.rows.rows import Moves, Placement, row_store

PLAIN = "plain"
TWO_LEVEL = "two-level"
#: Families whose attention is computed entirely by the function registered below.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Most rows above the context, held and new: all rows that may be live, and as many again that a
#: prune in transit has made void. Bounds a job's tree cache if its context is long.
TREE_ROWS = 2 * limits.TREE_ROWS

_REGISTERED = "flowspec_two_level"


class TwoLevelCache:
    """All layers' rows of one job: the first ``context`` in ``model``, later ones in ``tree``.

    ``model`` is ``[layers, 2, 1, heads, capacity, head_dim]``, keys before values, one tensor so
    that one copy moves a row of every layer. The layers append new rows to ``tree``.
    """

    def __init__(self, model: torch.Tensor, tree: TreeCache) -> None:
        self.model = model
        self.tree = tree
        self.context = 0
        self._rows = row_store()

    @classmethod
    def allocate(
        cls,
        layers: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> TwoLevelCache:
        """Allocate ``capacity`` context rows and up to ``TREE_ROWS`` above them.

        The rest is as for ``TreeCache``.
        """
        tree_rows = min(capacity, TREE_ROWS)
        tree = TreeCache.allocate(layers, heads, tree_rows, head_dim, dtype, device)
        shape = (layers, 2, 1, heads, capacity, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), tree)

    def begin_pass(self, part: Part) -> Placement:
        """Apply the part's prune and make room for its rows; return their placement.

        The placement is in one linear store. StateError if the rows above the context do not fit,
        or the part does not continue this cache.
        """
        placement = self._rows.place(part)
        self.carry_out(placement, len(part.ids))
        return placement

    def carry_out(self, placement: Placement, new: int) -> None:
        """Make the moves of ``placement``, and room for ``new`` rows after the held ones.

        The placement is in one linear store. Its slots below the previous pass's context never
        move, so the rows from there to the new context all come from the tree cache.
        """
        context = placement.context
        held = placement.held
        moves = placement.moves
        room = self.tree.storage.shape[-2]
        if held - context + new > room:
            raise StateError(
                f"{held - context + new} rows above the context do not fit the tree cache, "
                f"which has room for {room}; use smaller segments or {PLAIN} attention"
            )
        if moves is None:
            linear: tuple[int, ...] = tuple(range(self.context, held))
        else:
            linear = (*range(self.context, moves.start), *moves.sources)
        sources = tuple(slot - self.context for slot in linear)
        if context < self.context or len(sources) != held - self.context:
            raise StateError(
                f"a placement of {context} context rows, {held} held, "
                f"does not continue {self.context} rows"
            )
        promoted = context - self.context
        for start, source, count in copies(Moves(self.context, sources[:promoted])):
            rows = self.tree.storage[..., source : source + count, :]
            self.model[..., start : start + count, :] = rows
        tree_moves = Moves(0, sources[promoted:]) if promoted or moves else None
        self.tree.carry_out(tree_moves, held - context)
        self.context = context

    def kept(self, rows: int) -> CopiedRows:
        """A copy of the first ``rows`` context rows."""
        return CopiedRows(self.model[..., :rows, :].clone())

    def resume(self, rows: CopiedRows, held: int) -> None:
        """Begin with the first ``held`` context rows of what ``kept`` has returned."""
        self.model[..., :held, :] = rows.rows[..., :held, :]
        self._rows = row_store(held)
        self.context = held

    def context_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the context in the block's ``layer``.

        Each is ``[1, heads, context, head_dim]``.
        """
        keys, values = self.model[layer, :, :, :, : self.context]
        return keys, values


#: A job's rows at one block, in any store and under either attention.
RowCache = OneLevelCache | TwoLevelCache


def two_level_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    two_level: TwoLevelCache | Sequence[TwoLevelCache],
    ragged: RaggedCache | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with one softmax over the unmasked context and the masked tree rows.

    The context is ``two_level``'s. ``query`` is ``[1, heads, rows, head_dim]``; ``key`` and
    ``value`` are the tree cache's rows and the new ones, ``[1, key heads, tree, head_dim]``;
    ``attention_mask`` is what ``attention.bias_of`` returns for the tree's slots. Computed in
    float64 like ``attention.exact_attention``. ``ragged``: as there; ``two_level`` is then each
    job's. Returns ``[1, rows, heads, head_dim]`` and no weights. Source:
    docs/algorithms.md#two-level-cache.
    """
    if ragged is not None:
        assert isinstance(two_level, Sequence)
        shared = query.shape[1] // key.shape[1]
        shares = ragged.shares(module.layer_idx, shared, attention_mask)
        parts = [
            two_level_attention(
                module,
                query[:, :, share.rows],
                share.keys,
                share.values,
                share.bias,
                scaling=scaling,
                two_level=own,
            )[0]
            for share, own in zip(shares, two_level, strict=True)
        ]
        return torch.cat(parts, dim=1), None
    assert isinstance(two_level, TwoLevelCache)
    queries = grouped(query, key.shape[1]) * scaling
    past = [rows[0].to(queries.dtype) for rows in two_level.context_rows(module.layer_idx)]
    above = [rows[0].to(queries.dtype) for rows in (key, value)]
    masked = torch.baddbmm(attention_mask[0], queries, above[0].transpose(1, 2))
    scores = torch.cat((torch.bmm(queries, past[0].transpose(1, 2)), masked), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    output = torch.bmm(weights[..., : two_level.context], past[1])
    output += torch.bmm(weights[..., two_level.context :], above[1])
    return ungrouped(output, query), None


AttentionInterface.register(_REGISTERED, two_level_attention)


def implementation(attention: str, config: PretrainedConfig) -> str:
    """The library's name of ``attention``; ModelError if unknown or not allowed by ``config``."""
    if attention == PLAIN:
        return EXACT
    if attention != TWO_LEVEL:
        raise ModelError(f"attention {attention!r} is unknown; expected {PLAIN} or {TWO_LEVEL}")
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{TWO_LEVEL} attention serves {', '.join(FAMILIES)}, "
            f"not {config.model_type}; use {PLAIN}"
        )
    if getattr(config, "sliding_window", None) is not None:
        raise ModelError(
            f"{TWO_LEVEL} attention sees the whole context; this {config.model_type} model has a "
            f"sliding window of {config.sliding_window} tokens; use {PLAIN}"
        )
    return _REGISTERED
