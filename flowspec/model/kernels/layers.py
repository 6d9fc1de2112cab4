"""Plain decoder layers in C, all of a block in one call: ``layers.c``.

Beside the products, a small model's pass is mostly calls of small operations. The norms and the
activation are modules too, for who runs the library's layers: both have the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch

from flowspec.errors import ModelError
from flowspec.model.kernels.attention import KeptPiece, pieces_of
from flowspec.model.kernels.compiled import ROWS
from flowspec.model.kernels.integer import PackedMatrix

#: Rows, ``[rows, hidden]``, a range of layers and what goes into its first product in place of the
#: rows' norm, ``[rows, its inputs]``, if anything, to the rows after these layers.
Decode = Callable[[torch.Tensor, range, torch.Tensor | None], torch.Tensor]


class LinearParts(NamedTuple):
    """A linear layer over the rows of ``matrices``, one's outputs behind another's."""

    matrices: tuple[PackedMatrix, ...]
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """What a layer consists of: its norms, of which it may have one only, and linear layers."""

    before: torch.Tensor | None
    between: torch.Tensor
    query: torch.Tensor | None
    key: torch.Tensor | None
    qkv: LinearParts
    o: LinearParts
    gate_up: LinearParts
    down: LinearParts

    @property
    def linears(self) -> tuple[LinearParts, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class LayerShape(ctypes.Structure):
    """Sizes that all layers have; ``scale`` of scores, ``epsilon`` of norms."""

    _fields_ = (
        *((name, c_long) for name in ("hidden", "heads", "key_heads", "head_dim")),
        ("scale", c_double),
        ("epsilon", c_double),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        ("matrices", POINTER(PackedMatrix)),
        ("bias", c_void_p),
        ("count", c_long),
        ("outputs", c_long),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("before", "between", "query", "key")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("added", POINTER(KeptPiece)),
        ("kept", POINTER(KeptPiece)),
        ("bias", c_void_p),
        *((name, c_long) for name in ("added_count", "kept_count", "rows", "slots", "layer")),
    )


class CompiledLayers:
    """``layers`` of a block, of one ``shape``, over rows of type ``rows``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[PlainLayer],
        shape: LayerShape,
        rows: torch.dtype,
    ) -> None:
        self._kept = layers
        self._type = rows
        self._shape = shape
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        linears = [linear for layer in layers for linear in layer.linears]
        self._most_outputs = max(_outputs(linear) for linear in linears)
        self._most_inputs = max(linear.matrices[0].inputs for linear in linears)
        self._decode = library.decode
        self._decode.argtypes = (
            *(c_void_p, c_long, c_long, POINTER(LayerShape), c_int),  # layers, count, first
            *(c_void_p, c_void_p, c_long),  # rows, what enters, their count
            *(c_void_p, POINTER(_Job), c_long),  # turn, jobs, their count
            *(c_long, c_long, c_int),  # most outputs and inputs, threads
        )

    def over(
        self,
        turn: torch.Tensor,
        added: Sequence[Sequence[torch.Tensor]],
        kept: Sequence[Sequence[torch.Tensor]],
        biases: Sequence[torch.Tensor],
    ) -> Decode:
        """A pass, which keeps its rows' keys and values.

        ``turn``: cosines and signed sines, ``[rows, 2, 1, head_dim]``. ``added``, ``kept``,
        ``biases``: of each job whose rows these are, one's behind another's: where the keys and
        values of its rows go and where all up to them are, in pieces ``[layers, 2, key heads,
        rows, head_dim]``, and what is added to the scores, float64 ``[1, 1, shared x rows,
        slots]``.
        """
        jobs = (_Job * len(added))(*starmap(_job, zip(added, kept, biases, strict=True)))
        every = [rows for some in (*added, *kept) for rows in some]
        forms = {(*rows.shape[1:3], rows.shape[4], *rows.stride()[3:]) for rows in every}
        types = {turn.dtype, *(rows.dtype for rows in every)}
        count = sum(job.rows for job in jobs)
        shape = self._shape
        dim = shape.head_dim
        if (
            turn.shape != (count, 2, 1, dim)
            or not turn.is_contiguous()
            or forms != {(2, shape.key_heads, dim, dim, 1)}
            or min(len(rows) for rows in every) < len(self._layers)
            or types != {self._type}
        ):
            raise ModelError(f"layers over {count} rows of {types}")
        return partial(self._run, turn, jobs, (every, biases))

    def _run(
        self,
        turn: torch.Tensor,
        jobs: ctypes.Array[_Job],
        held: object,  # what ``jobs`` point to
        hidden: torch.Tensor,
        layers: range,
        entering: torch.Tensor | None,
    ) -> torch.Tensor:
        del held
        if hidden.shape != (len(turn), self._shape.hidden) or hidden.dtype != self._type:
            raise ModelError(f"layers over {tuple(hidden.shape)} rows of {hidden.dtype}")
        found = hidden.clone(memory_format=torch.contiguous_format)
        if entering is not None:
            inputs = self._kept[layers.start].qkv.matrices[0].inputs
            entering = entering.contiguous()
            if entering.shape != (len(found), inputs) or entering.dtype != self._type:
                raise ModelError(f"rows {tuple(entering.shape)} enter; {inputs} wide expected")
        if self._decode(
            *(ctypes.byref(self._layers, layers.start * ctypes.sizeof(_Layer)), len(layers)),
            *(layers.start, ctypes.byref(self._shape), found.dtype == torch.bfloat16),
            *(found.data_ptr(), _pointer(entering), len(found)),
            *(turn.data_ptr(), jobs, len(jobs)),
            *(self._most_outputs, self._most_inputs, torch.get_num_threads()),
        ):
            raise MemoryError(f"no memory for the layers of {len(found)} rows")
        return found


class CompiledNorm(torch.nn.Module):
    """Stands in for ``norm``, the library's root-mean-square norm; its sum is in float64."""

    def __init__(self, library: ctypes.CDLL, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = float(norm.variance_epsilon)
        self._normalise = library.normalise
        self._normalise.argtypes = (
            *(c_void_p, c_int, c_long, c_long),  # rows, half, their count and width
            *(c_void_p, c_double, c_void_p),  # weights, epsilon, found
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same."""
        width = rows.shape[-1]
        if rows.dtype != self.weight.dtype or rows.dtype not in ROWS or width != len(self.weight):
            raise ModelError(f"a norm of rows of {rows.dtype}, {width} wide")
        given = rows.contiguous()
        found = torch.empty_like(given)
        self._normalise(
            *(given.data_ptr(), given.dtype == torch.bfloat16, given.numel() // width, width),
            *(self.weight.data_ptr(), self.variance_epsilon, found.data_ptr()),
        )
        return found


class CompiledSilu(torch.nn.Module):
    """Stands in for the library's SiLU; its exponential is within two roundings."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._activate = library.activate
        self._activate.argtypes = (c_void_p, c_int, c_long, c_void_p)

    def forward(self, gates: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        if gates.dtype not in ROWS:
            raise ModelError(f"an activation of {gates.dtype}")
        given = gates.contiguous()
        found = torch.empty_like(given)
        half = given.dtype == torch.bfloat16
        self._activate(given.data_ptr(), half, given.numel(), found.data_ptr())
        return found


def _job(added: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], bias: torch.Tensor) -> _Job:
    """One job's part of a pass, as ``CompiledLayers.over`` takes it."""
    rows, slots = (sum(piece.shape[-2] for piece in pieces) for pieces in (added, kept))
    if bias.dtype != torch.float64 or not bias.is_contiguous():
        raise ModelError("attention with a mask that is not float64, or not in one piece")
    if bias.shape[-1] != slots or bias.shape[-2] < rows:
        raise ModelError(f"attention by a mask of {tuple(bias.shape)} to {slots} slots")
    pieces = pieces_of(added), pieces_of(kept)
    counts = len(added), len(kept)
    return _Job(*pieces, bias.data_ptr(), *counts, rows, slots, kept[0].stride(0))


def _layer(layer: PlainLayer) -> _Layer:
    norms = (layer.before, layer.between, layer.query, layer.key)
    return _Layer(*map(_pointer, norms), *map(_linear, layer.linears))


def _linear(linear: LinearParts) -> _Linear:
    matrices = (PackedMatrix * len(linear.matrices))(*linear.matrices)
    return _Linear(matrices, _pointer(linear.bias), len(matrices), _outputs(linear))


def _outputs(linear: LinearParts) -> int:
    return sum(matrix.outputs for matrix in linear.matrices)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
