"""Experts of a mixture by the kernels of linear layers, and routers whose choice is a row's own.

The library's code for experts multiplies all rows of a pass together, in products whose last bits
depend on how many rows share an expert. Here every expert has two linear layers of its own, and a
row's sum over its experts is in their order. The gate between the two is the library's function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flowspec.model.layers.linear import KernelLinear
from flowspec.model.rows.attention import wide_type

#: Weights of the library's modules of experts, ``[experts, ...]``.
WEIGHTS = ("gate_up_proj", "down_proj")


class Experts(torch.nn.Module):
    """Stands in for the library's module of experts ``rule``, which applies the gate only."""

    def __init__(
        self, rule: Any, first: Sequence[KernelLinear], second: Sequence[KernelLinear]
    ) -> None:
        super().__init__()
        for name, _ in list(rule.named_parameters(recurse=False)):
            delattr(rule, name)
        self.rule = rule
        self.first = torch.nn.ModuleList(first)
        self.second = torch.nn.ModuleList(second)

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the experts ``chosen`` for each of ``rows``, ``[rows, hidden]``.

        ``chosen`` and ``weights`` are ``[rows, experts per row]``.
        """
        total = torch.zeros_like(rows)
        for expert in torch.unique(chosen).tolist():
            at, place = torch.where(chosen == expert)
            inner = self.rule._apply_gate(self.first[expert](rows[at]))
            output = self.second[expert](inner) * weights[at, place, None]
            total.index_add_(0, at, output.to(total.dtype))
        return total


class ExactRouter(torch.nn.Module):
    """A router that computes in float64 and rounds its answers to the rows' type.

    Else the order of its sums would depend on the number of rows, and a near tie between experts
    would fall one way in a tree and another way alone.
    """

    def __init__(self, router: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self.router = router.to(wide_type(device))

    def forward(self, rows: torch.Tensor, *rest: Any) -> Any:
        """What the library's router returns."""
        outputs = self.router(rows.to(wide_type(rows.device)), *rest)
        if isinstance(outputs, torch.Tensor):
            return _narrow(outputs, rows.dtype)
        return tuple(_narrow(output, rows.dtype) for output in outputs)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a mixture's experts in the library's layout."""
    return hasattr(module, "_apply_gate") and all(
        getattr(module, name, None) is not None and getattr(module, name).ndim == 3
        for name in WEIGHTS
    )


def make_routers_exact(block: torch.nn.Module, device: torch.device) -> None:
    """Wrap every router in ``block``: what has weights of its own beside a module of experts."""
    for owner in list(block.modules()):
        if not any(isinstance(child, Experts) for child in owner.children()):
            continue
        for name, child in list(owner.named_children()):
            weight = dict(child.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.ndim == 2:
                setattr(owner, name, ExactRouter(child, device))


def _narrow(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
