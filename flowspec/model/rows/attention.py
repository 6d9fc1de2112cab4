"""Attention of tree rows, registered with the library, whose layers call it.

A row's result must not depend on what shares its pass. Its sums run over slots whose number and
order depend on other rows, so in the rows' own precision their last bits would differ. Here the
scores, the softmax and the weighted sum are in float64 and rounded once, which hides the order of
the sums but for a tie in the rounding (ops/bench/results/row-independence.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flowspec.model.rows.ragged import RaggedCache

#: The library's names of ``exact_attention`` and of ``library_attention``.
EXACT = "flowspec_exact"
LIBRARY = "flowspec_library"
#: Devices that compute in float64 at a useful speed; on others rows depend on their company.
EXACT_DEVICES = ("cpu",)


def wide_type(device: torch.device) -> torch.dtype:
    """The type that attention computes in on ``device``."""
    return torch.float64 if device.type in EXACT_DEVICES else torch.float32


def bias_of(mask: npt.NDArray[np.bool_], shared: int, device: torch.device) -> torch.Tensor:
    """The mask as attention takes it: ``[1, 1, shared x rows, slots]``, added to the scores.

    ``mask`` is ``[rows, slots]``, True where a row attends to a slot. ``shared``: query heads of
    one key head, which are rows of one product.
    """
    rows, slots = mask.shape
    bias = np.where(mask, 0.0, -np.inf)
    if shared > 1:
        bias = np.tile(bias, (shared, 1))
    whole = torch.from_numpy(bias.reshape(1, 1, shared * rows, slots))
    return whole.to(wide_type(device)).to(device)


def grouped(query: torch.Tensor, key_heads: int) -> torch.Tensor:
    """``query``, ``[1, heads, rows, head_dim]``, as ``[key heads, shared x rows, head_dim]``, wide.

    ``wide_type`` says how wide.
    """
    wide = query.to(wide_type(query.device))
    return wide.reshape(key_heads, -1, query.shape[-1])


def ungrouped(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The reverse of ``grouped``, in the query's type, as ``[1, rows, heads, head_dim]``."""
    return output.to(query.dtype).view(query.shape).transpose(1, 2).contiguous()


def exact_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ragged: RaggedCache | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention with one softmax over the unmasked slots.

    ``query`` is ``[1, heads, rows, head_dim]``; ``key`` and ``value`` are ``[1, key heads, slots,
    head_dim]``; ``attention_mask`` is what ``bias_of`` returns. ``softcap``: bound of the scores,
    by tanh (Gemma 2). ``s_aux``: a score for each head that takes part in the softmax alone
    (gpt-oss). ``ragged``: the rows are of several jobs, whose keys and values are there; the mask
    is ``ragged.joined``. Returns ``[1, rows, heads, head_dim]`` in the query's type and no weights.
    """
    if ragged is not None:
        parts = [
            exact_attention(
                module,
                query[:, :, own.rows],
                own.keys,
                own.values,
                own.bias,
                scaling=scaling,
                softcap=softcap,
                s_aux=s_aux,
            )[0]
            for own in ragged.by_job(
                module.layer_idx, query.shape[1] // key.shape[1], attention_mask
            )
        ]
        return torch.cat(parts, dim=1), None
    queries = grouped(query, key.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys = key[0].to(queries.dtype)
    values = value[0].to(queries.dtype)
    bias = attention_mask[0]
    if softcap is None and s_aux is None:
        return ungrouped(weighted(queries, keys, values, bias, scale), query), None
    if softcap is None:
        scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale)
    else:
        products = torch.bmm(queries, keys.transpose(1, 2))
        scores = torch.tanh(products * (scale / softcap)) * softcap + bias
    if s_aux is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        rows = query.shape[2]
        sinks = s_aux.to(scores.dtype).view(key.shape[1], -1, 1).repeat_interleave(rows, dim=1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    return ungrouped(torch.bmm(weights, values), query), None


def weighted(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One softmax and the weighted sum, all wide, ``[key heads, shared x rows, head_dim]``.

    ``queries`` has that shape, ``keys`` and ``values`` are ``[key heads, slots, head_dim]``,
    ``bias`` is ``[1, shared x rows, slots]``.
    """
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def library_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    ragged: RaggedCache | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The library's own attention; over the rows of several jobs (``ragged``) one by one.

    Parameters and result are as ``exact_attention``'s, but ``attention_mask`` is boolean, ``[1, 1,
    rows, slots]``; of several jobs, ``ragged.joined``.
    """
    if ragged is None:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return found, None
    parts = [
        # A mask that begins anywhere in another one is not aligned as some devices want it.
        sdpa_attention_forward(
            module, query[:, :, own.rows], own.keys, own.values, own.bias.clone(), **more
        )[0]
        for own in ragged.by_job(module.layer_idx, 1, attention_mask)
    ]
    return torch.cat(parts, dim=1), None


AttentionInterface.register(EXACT, exact_attention)
AttentionInterface.register(LIBRARY, library_attention)
