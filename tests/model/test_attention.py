"""Our attention against its definition, and rows that do not depend on where they lie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flowspec.model.rows.attention import bias_of, exact_attention

CPU = torch.device("cpu")


def case(
    heads: int, key_heads: int, rows: int, slots: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads + rows + slots)
    query = torch.randn(1, heads, rows, 8, generator=source).to(dtype)
    key, value = torch.randn(2, 1, key_heads, slots, 8, generator=source).to(dtype)
    mask = torch.rand(rows, slots, generator=source) < 0.6
    mask[:, 0] = True
    return query, key, value, mask


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (4, 1)])
def test_it_is_the_softmax_over_what_a_row_sees(
    heads: int, key_heads: int, sinks: bool, softcap: float | None
) -> None:
    query, key, value, mask = case(heads, key_heads, 5, 9)
    aux = torch.linspace(-1, 2, heads) if sinks else None
    bias = bias_of(mask.numpy(), heads // key_heads, CPU)
    found, _ = exact_attention(
        None, query, key, value, bias, scaling=0.4, softcap=softcap, s_aux=aux
    )
    for head in range(heads):
        of = head // (heads // key_heads)
        for row in range(5):
            scores = [float(query[0, head, row] @ key[0, of, slot]) * 0.4 for slot in range(9)]
            if softcap:
                scores = [math.tanh(score / softcap) * softcap for score in scores]
            weights = [math.exp(s) if mask[row, at] else 0.0 for at, s in enumerate(scores)]
            total = sum(weights) + (math.exp(float(aux[head])) if aux is not None else 0.0)
            wanted = sum(weight / total * value[0, of, at] for at, weight in enumerate(weights))
            assert torch.allclose(found[0, row, head], wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_among_others_and_among_dead_slots(dtype: torch.dtype) -> None:
    query, key, value, mask = case(6, 2, 16, 60, dtype)
    together, _ = exact_attention(None, query, key, value, bias_of(mask.numpy(), 3, CPU))
    for row in range(16):
        seen = torch.nonzero(mask[row]).flatten()
        alone, _ = exact_attention(
            None,
            query[:, :, row : row + 1],
            key[:, :, seen],
            value[:, :, seen],
            bias_of(np.ones((1, len(seen)), dtype=np.bool_), 3, CPU),
        )
        assert torch.equal(alone[0, 0], together[0, row])
