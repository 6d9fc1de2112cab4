"""Filling a block that was built without memory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowspec.errors import ModelError
from flowspec.model.layers.experts import WEIGHTS, Experts, is_experts, make_routers_exact
from flowspec.model.layers.joined import Stack, grouped, parts_of
from flowspec.model.layers.linear import KernelLinear, load_linear
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.quantise import Weight, quantise
from flowspec.model.weights.stored_weight import StoredWeight
from flowspec.model.weights.tensor_files import TensorEntry
from flowspec.model.weights.tensors import read_bytes, read_rows, read_tensor

#: Names of the block's LM head, and of its embedding in the checkpoint.
HEAD = "head.causal.lm_head"
_EMBEDDING = "model.embed_tokens.weight"
#: Names of one expert's matrices in checkpoints that have a tensor for each: the parts of
#: ``gate_up_proj`` one above the other, then ``down_proj``.
_SEPARATE = (
    (("gate_proj.weight", "up_proj.weight"), ("down_proj.weight",)),
    (("w1.weight", "w3.weight"), ("w2.weight",)),
)
#: The library's name of a mixture in a layer, and the one in Mixtral's checkpoints.
_RENAMED = (".mlp.", ".block_sparse_moe.")


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
        self._renamed = any(_RENAMED[1] in name for name in directory.weight_files)

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
        _check(stored, entry.shape, shape)
        value = read_tensor(stored, entry, dtype or self._placing.rows)
        return value.to(self._placing.device)

    def _linear(self, name: str, module: torch.nn.Linear) -> KernelLinear:
        placing = self._placing
        stored = self._stored_name(f"{name}.weight")
        weight = StoredWeight(self._directory, stored)
        shape = (module.out_features, module.in_features)
        _check(stored, weight.shape, shape)
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
            _check(stored, weight.shape, (module.out_features, module.in_features))
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
            stack = _Stack(
                self._directory,
                self._stored_name(name),
                at,
                (outputs, inputs),
                transposed=module.is_transposed,
            )
            both.append(
                [self._expert(stack, expert, module.has_bias) for expert in range(extents[0])]
            )
        return Experts(module, *both)

    def _expert(self, stack: _Stack, expert: int, biased: bool) -> KernelLinear:
        placing = self._placing
        weight = _ExpertWeight(stack, expert)
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
        return stored.replace(*_RENAMED) if self._renamed else stored


def _weights(linears: list[torch.nn.Linear]) -> int:
    return sum(linear.weight.numel() for linear in linears)


class _ExpertWeight:
    """One expert's matrix of a stack."""

    def __init__(self, stack: _Stack, expert: int) -> None:
        self._stack = stack
        self._expert = expert

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stack.shape

    def read(self, rows: range, precision: str) -> Weight:
        """``rows`` of the matrix in ``precision``; errors as ``quantise``'s and ``read_rows``'s."""
        shape = (len(rows), self.shape[1])
        return quantise(self._stack.rows(self._expert, rows), shape, precision)


class _Stack:
    """A matrix of every expert of a mixture, in any of the layouts of checkpoints.

    ``prefix``: the stored name of the module of experts. ``at``: which of ``WEIGHTS`` is read, a
    matrix of ``shape`` for each expert. ``transposed``: a tensor of all experts holds it with rows
    and columns exchanged.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        prefix: str,
        at: int,
        shape: tuple[int, int],
        *,
        transposed: bool,
    ) -> None:
        self.shape = shape
        self._directory = directory
        self._prefix = prefix
        self._at = at
        self._name = f"{prefix}.{WEIGHTS[at]}"
        self._transposed = transposed

    def rows(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        """``rows`` of the expert's matrix, in slices."""
        if self._name in self._directory.weight_files:
            return self._of_stack(expert, rows)
        if f"{self._name}_blocks" in self._directory.weight_files:
            return self._of_blocks(expert, rows)
        return self._separate(expert, rows)

    def bias(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The expert's bias, which is in one tensor with all others."""
        name = f"{self._name}_bias"
        entry = _member(self._directory.tensor(name), expert)
        _check(name, entry.shape, self.shape[:1])
        return read_tensor(name, entry, dtype)

    def _of_stack(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        entry = _member(self._directory.tensor(self._name), expert)
        _check(self._name, entry.shape, self.shape[::-1] if self._transposed else self.shape)
        if not self._transposed:
            return read_rows(self._name, entry, rows)
        whole = torch.cat(list(read_rows(self._name, entry)))
        return iter((whole.t()[rows.start : rows.stop],))

    def _of_blocks(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        """From mxfp4, as bfloat16, which holds its values exactly."""
        parts = []
        for part in ("blocks", "scales"):
            name = f"{self._name}_{part}"
            parts.append(read_bytes(name, _member(self._directory.tensor(name), expert))[None])
        values = convert_moe_packed_tensors(*parts)[0].t()
        _check(f"{self._name}_blocks", tuple(values.shape), self.shape)
        return iter((values[rows.start : rows.stop],))

    def _separate(self, expert: int, rows: range) -> Iterator[torch.Tensor]:
        """From a tensor for each part of each expert's matrix, the parts one above the other."""
        prefix = f"{self._prefix}.{expert}."
        files = self._directory.weight_files
        layouts = [layout[self._at] for layout in _SEPARATE]
        parts = next((found for found in layouts if prefix + found[0] in files), layouts[0])
        height = self.shape[0] // len(parts)
        for at, part in enumerate(parts):
            name = prefix + part
            entry = self._directory.tensor(name)
            _check(name, entry.shape, (height, self.shape[1]))
            first = max(rows.start - at * height, 0)
            end = min(rows.stop - at * height, height)
            yield from read_rows(name, entry, range(first, max(first, end)))


def _member(entry: TensorEntry, at: int) -> TensorEntry:
    """Element ``at`` of a tensor along its first dimension."""
    if not entry.shape or at >= entry.shape[0]:
        return replace(entry, shape=())
    size = (entry.end - entry.start) // entry.shape[0]
    start = entry.start + at * size
    return replace(entry, start=start, end=start + size, shape=entry.shape[1:])


def _check(stored: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise ModelError(f"{stored} has shape {found}; the config says {shape}")
