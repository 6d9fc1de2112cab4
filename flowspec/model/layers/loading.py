"""Filling a block that was built without memory, one tensor at a time."""

from __future__ import annotations

from typing import Any

import torch

from flowspec.errors import ModelError
from flowspec.model.layers.expert_matrices import ExpertMatrices, mixture_names
from flowspec.model.layers.experts import WEIGHTS, Experts, is_experts, make_routers_exact
from flowspec.model.layers.joined import Stack, grouped, parts_of
from flowspec.model.layers.linear import KernelLinear, load_linear
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.stored_weight import StoredWeight
from flowspec.model.weights.tensors import check_shape, read_tensor

#: Names of the block's LM head, and of its embedding in the checkpoint.
HEAD = "head.causal.lm_head"
_EMBEDDING = "model.embed_tokens.weight"


class Loader:
    """Replaces every tensor and linear layer of ``block``, which holds ``layers``.

    ``join``: linear layers over the same rows become one product where that is exact (``joined``).
    """

    def __init__(
        self,
        block: torch.nn.Module,
        directory: ModelDirectory,
        layers: range,
        placing: Placing,
        *,
        join: bool = False,
    ) -> None:
        self._block = block
        self._join = join
        self._directory = directory
        self._layers = layers
        self._placing = placing
        self._mixture_name = mixture_names(directory)

    def load(self) -> None:
        """Read all weights; ModelError names one that is not there."""
        block = self._block
        for name, module in list(block.named_modules()):
            if is_experts(module):
                self._replace(name, self._experts(name, module))
        linears = {
            name: module
            for name, module in block.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        placing = self._placing
        groups: list[tuple[str, ...]] = [(name,) for name in linears]
        if self._join:
            groups = grouped(linears, placing.precision, placing.rows, placing.device)
        # The larger a matrix, the more memory its packing takes: it comes while little is held.
        for group in sorted(groups, key=lambda names: -_weights([linears[name] for name in names])):
            if len(group) == 1:
                self._replace(group[0], self._linear(group[0], linears[group[0]]))
            else:
                self._replace_joined({name: linears[name] for name in group})
        for name, parameter in list(block.named_parameters()):
            if parameter.is_meta:
                value = self._tensor(name, tuple(parameter.shape))
                self._replace(name, torch.nn.Parameter(value, requires_grad=False))
        for name, buffer in list(block.named_buffers()):
            if buffer.is_meta:
                self._replace(name, self._tensor(name, tuple(buffer.shape), buffer.dtype))
        make_routers_exact(block, self._placing.device)
        block.to(self._placing.device)

    def _replace(self, name: str, value: object) -> None:
        owner, _, leaf = name.rpartition(".")
        setattr(self._block.get_submodule(owner), leaf, value)

    def _tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        stored = self._stored_name(name)
        entry = self._directory.tensor(stored)
        check_shape(stored, entry.shape, shape)
        value = read_tensor(stored, entry, dtype or self._placing.rows)
        return value.to(self._placing.device)

    def _linear(self, name: str, module: torch.nn.Linear) -> KernelLinear:
        placing = self._placing
        stored = self._stored_name(f"{name}.weight")
        weight = StoredWeight(self._directory, stored)
        shape = (module.out_features, module.in_features)
        check_shape(stored, weight.shape, shape)
        head = name == HEAD
        precision = placing.head if head else placing.precision
        rows = placing.head_rows if head else placing.rows
        linear = load_linear(weight, precision, rows, placing.device)
        if module.bias is not None:
            linear.bias = self._tensor(f"{name}.bias", (shape[0],)).to(rows)
        return linear

    def _replace_joined(self, group: dict[str, torch.nn.Linear]) -> None:
        """Replace the layers of ``group`` by parts of one product."""
        placing = self._placing
        weights = []
        for name, module in group.items():
            stored = self._stored_name(f"{name}.weight")
            weight = StoredWeight(self._directory, stored)
            check_shape(stored, weight.shape, (module.out_features, module.in_features))
            weights.append(weight)
        whole = load_linear(Stack(weights), placing.precision, placing.rows, placing.device)
        biases = [
            self._tensor(f"{name}.bias", (module.out_features,))
            for name, module in group.items()
            if module.bias is not None
        ]
        if biases:
            whole.bias = torch.cat(biases)
        parts = parts_of(whole, [module.out_features for module in group.values()])
        for name, part in zip(group, parts, strict=True):
            self._replace(name, part)

    def _experts(self, name: str, module: Any) -> Experts:
        """One expert after the other, so that a single one exists twice at a time."""
        if module.has_post_expert_norm:
            raise ModelError(
                f"{self._directory.path}: {type(module).__name__} normalises after each expert; "
                "not supported"
            )
        both = []
        for at, weights in enumerate(WEIGHTS):
            extents = getattr(module, weights).shape
            outputs, inputs = extents[:0:-1] if module.is_transposed else extents[1:]
            stack = ExpertMatrices(
                self._directory,
                self._stored_name(name),
                at,
                (outputs, inputs),
                transposed=module.is_transposed,
                interleaved=not module.is_concatenated,
            )
            both.append(
                [self._expert(stack, expert, module.has_bias) for expert in range(extents[0])]
            )
        return Experts(module, *both)

    def _expert(self, stack: ExpertMatrices, expert: int, biased: bool) -> KernelLinear:
        placing = self._placing
        weight = stack.of(expert)
        linear = load_linear(weight, placing.precision, placing.rows, placing.device)
        if biased:
            linear.bias = stack.bias(expert, placing.rows).to(placing.device)
        return linear

    def _stored_name(self, name: str) -> str:
        """The name in the checkpoint of the block's tensor or module ``name``."""
        if name == f"{HEAD}.weight" and self._directory.tied:
            return _EMBEDDING
        if name.startswith(HEAD):
            return "lm_head" + name.removeprefix(HEAD)
        stored = "model." + name.removeprefix("body.")
        if stored.startswith("model.layers."):
            number, _, rest = stored.removeprefix("model.layers.").partition(".")
            stored = f"model.layers.{int(number) + self._layers.start}.{rest}"
        return self._mixture_name(stored)


def _weights(linears: list[torch.nn.Linear]) -> int:
    return sum(linear.weight.numel() for linear in linears)
