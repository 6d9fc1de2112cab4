"""PipeDec's two-level KV cache and dynamic tree attention, as an attention path of a stage.

The *model cache* holds the context, which every row sees; the *tree cache* holds the rows above
it, the only ones with a mask. Rows move from the second to the first as they become context. A
prompt row is a tree row during its own pass and context from the next one on. Source: PipeDec,
two-level KV cache and dynamic tree attention (``algorithms.md`` 3.4). Grouped queries share
their head's keys without copies.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig

from flowspec.core.run import limits
from flowspec.core.tree.slots import Moves
from flowspec.errors import ModelError, StateError
from flowspec.model.kv import TreeCache, runs

PLAIN = "plain"
TWO_LEVEL = "two-level"
#: Families whose layers leave attention to the function registered below, with nothing else to it.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Most rows above the context, held and new: what may live at once, and as much again that a prune
#: still on its way has made void. Bounds a job's second store where its context is long.
TREE_ROWS = 2 * limits.TREE_ROWS

_REGISTERED = "flowspec_two_level"


class TwoLevelCache:
    """All layers' rows of one job. ``model`` is ``[layers, 2, 1, heads, capacity, head_dim]``, keys
    before values, one tensor so that one copy moves a row of every layer; ``tree`` takes what
    the layers compute.

    ``context``: rows in ``model``.
    """

    def __init__(self, model: torch.Tensor, tree: TreeCache) -> None:
        self.model = model
        self.tree = tree
        self.context = 0

    @classmethod
    def allocate(
        cls, layers: int, heads: int, capacity: int, head_dim: int, dtype: torch.dtype
    ) -> TwoLevelCache:
        """Room for ``capacity`` context rows and up to ``TREE_ROWS`` above them; pages are touched
        only as rows are written.
        """
        tree = TreeCache.allocate(layers, heads, min(capacity, TREE_ROWS), head_dim, dtype)
        return cls(torch.empty((layers, 2, 1, heads, capacity, head_dim), dtype=dtype), tree)

    def begin_pass(self, context: int, held: int, moves: Moves | None, new: int) -> None:
        """Carry out ``moves`` and let ``new`` rows follow the ``held`` ones, ``context`` of which
        are context.

        The arguments are a ``slots.Plan``'s and speak of one linear store; its slots below the
        context of the pass before never move, so the rows up to the new context all come from
        the tree cache. StateError if the rows above the context do not fit, or the plan does not
        continue this cache.
        """
        room = self.tree.storage.shape[-2]
        if held - context + new > room:
            raise StateError(
                f"{held - context + new} rows above the context do not fit the tree cache, which "
                f"has room for {room}; "
                f"use smaller segments or {PLAIN} attention"
            )
        linear = (
            range(self.context, held)
            if moves is None
            else (*range(self.context, moves.start), *moves.sources)
        )
        sources = tuple(slot - self.context for slot in linear)
        if context < self.context or len(sources) != held - self.context:
            raise StateError(
                f"a plan of {context} context rows, {held} held, does not continue {self.context} "
                "rows"
            )
        promoted = context - self.context
        for start, source, count in runs(Moves(self.context, sources[:promoted])):
            self.model[..., start : start + count, :] = self.tree.storage[
                ..., source : source + count, :
            ]
        self.tree.begin_pass(
            held - context, Moves(0, sources[promoted:]) if promoted or moves else None
        )
        self.context = context

    def context_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the context at ``layer`` of the block, ``[1, heads, context,
        head_dim]`` each.
        """
        keys, values = self.model[layer, :, :, :, : self.context]
        return keys, values


#: A job's rows at one block, under either attention.
RowCache = TreeCache | TwoLevelCache


def two_level_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    two_level: TwoLevelCache,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over ``two_level``'s context, unmasked, and over ``key`` and ``value``, masked: one
    softmax.

    ``query`` is ``[1, heads, rows, head_dim]``; ``key`` and ``value`` are the tree cache's rows
    with the new ones, ``[1, key heads, tree, head_dim]``; ``attention_mask`` is boolean, ``[1,
    1, rows, tree]``, True where a row sees another. Returns ``[1, rows, heads, head_dim]`` and
    no weights. Source: ``algorithms.md`` 3.4.
    """
    past_keys, past_values = two_level.context_rows(module.layer_idx)
    heads, rows, width = query.shape[1:]
    shared = heads // key.shape[1]
    grouped = (query * scaling).reshape(1, key.shape[1], shared * rows, width)
    scores = torch.cat((grouped @ past_keys.transpose(2, 3), grouped @ key.transpose(2, 3)), dim=-1)
    above = scores.view(1, -1, shared, rows, scores.shape[-1])[..., two_level.context :]
    above.masked_fill_(~attention_mask.unsqueeze(2), float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    output = (
        weights[..., : two_level.context] @ past_values + weights[..., two_level.context :] @ value
    )
    return output.reshape(1, heads, rows, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(_REGISTERED, two_level_attention)


def implementation(attention: str, config: PretrainedConfig) -> str:
    """The library's name of ``attention``; ModelError if there is no such attention or ``config``
    rules it out.
    """
    if attention == PLAIN:
        return "sdpa"
    if attention != TWO_LEVEL:
        raise ModelError(f"attention {attention!r} is unknown; expected {PLAIN} or {TWO_LEVEL}")
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"{TWO_LEVEL} attention serves {', '.join(FAMILIES)}, not {config.model_type}; use "
            f"{PLAIN}"
        )
    if getattr(config, "sliding_window", None) is not None:
        raise ModelError(
            f"{TWO_LEVEL} attention sees the whole context; this {config.model_type} model has a "
            f"sliding window of {config.sliding_window} tokens; use {PLAIN}"
        )
    return _REGISTERED
