"""Attention in float64 in C, over rows as they are kept: ``attention.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_long, c_void_p

import torch

from flowspec.errors import ModelError
from flowspec.model.kernels.compiled import ROWS, compiled

_ARGUMENTS = (
    *(c_int, c_void_p, c_long, c_long),  # half, queries, numbers between their heads and rows
    *(c_long, c_long, c_long, c_long),  # heads, shared, count, dim
    *(c_void_p, c_void_p, c_long, c_double),  # pieces, bias, slots, scale
    *(c_void_p, c_int),  # found, threads
)
#: Numbers of a head that are read at once.
_TOGETHER = 16


class KeptPiece(ctypes.Structure):
    """A range of kept rows, as the sources have it."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("count", c_long),
        ("head", c_long),
    )


def pieces_of(kept: Sequence[torch.Tensor]) -> ctypes.Array[KeptPiece]:
    """Of rows ``[..., 2, key heads, slots, head_dim]``, where all dimensions before are 0."""
    found = (KeptPiece * len(kept))()
    for piece, rows in zip(found, kept, strict=True):
        keys = rows.data_ptr()
        values = keys + rows.stride(-4) * rows.element_size()
        piece.keys, piece.values = keys, values
        piece.count, piece.head = rows.shape[-2], rows.stride(-3)
    return found


class ExactAttention:
    """One softmax over the unmasked slots for each row and head, rounded once, as ``exact``'s."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = library.attend
        self._attend.argtypes = _ARGUMENTS

    def into(
        self,
        found: torch.Tensor,
        queries: torch.Tensor,
        kept: Sequence[torch.Tensor],
        bias: torch.Tensor,
        scale: float,
    ) -> None:
        """Write what the rows find, ``[rows, heads, head_dim]``, into ``found``.

        ``queries``: ``[heads, rows, head_dim]``, in the type of ``found``. ``kept``: pieces of the
        keys and values, ``[2, key heads, slots, head_dim]``, in that type. ``bias``: float64, what
        is added to the scores, ``[1, shared x rows, slots]``.
        """
        heads, count, dim = queries.shape
        slots = sum(piece.shape[2] for piece in kept)
        alike = all(rows.dtype == found.dtype for rows in (queries, *kept))
        close = queries.stride(2) == 1 and all(rows.stride()[2:] == (dim, 1) for rows in kept)
        if not (alike and close and found.is_contiguous()):
            raise ModelError(
                "attention over rows of several types, or that lie otherwise than kept"
            )
        if bias.dtype != torch.float64 or bias.shape[-1] != slots or not bias.is_contiguous():
            raise ModelError(f"attention to {bias.shape[-1]} slots, of which {slots} are kept")
        pieces = pieces_of(kept)
        if self._attend(
            *(queries.dtype == torch.bfloat16, queries.data_ptr(), *queries.stride()[:2]),
            *(heads, heads // kept[0].shape[1], count, dim, pieces),
            *(bias.data_ptr(), slots, scale, found.data_ptr(), torch.get_num_threads()),
        ):
            raise MemoryError(f"no memory for the attention of {count} rows")


def exact_attention_for(
    head_dim: int, rows: torch.dtype, device: torch.device
) -> ExactAttention | None:
    """The compiled attention over rows of this kind; None: it cannot be had, or not for them."""
    library = library_for(head_dim, rows, device)
    return None if library is None else ExactAttention(library)


def library_for(head_dim: int, rows: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """What is compiled, for heads and rows of this kind; None: as ``exact_attention_for``'s."""
    if device.type != "cpu" or rows not in ROWS or head_dim % _TOGETHER:
        return None
    library = compiled()
    return None if isinstance(library, str) else library
