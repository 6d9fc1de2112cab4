"""A linear layer multiplied by a kernel, and whether its rows depend on what shares their pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flowspec.model.directory import TensorEntry
from flowspec.model.kernels import kernels_for
from flowspec.model.kernels.base import Kernel, Packed
from flowspec.model.quantise import quantise
from flowspec.model.weights import read_rows

#: Row counts at which a kernel is compared with a pass over the most of them.
_COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 32)
_MOST = 64


class KernelLinear(torch.nn.Module):
    """Stands in for ``torch.nn.Linear`` in the library's layers."""

    def __init__(
        self,
        shape: tuple[int, int],
        packed: Packed,
        kernel: str,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.kernel = kernel
        self.bias = bias
        self._packed = packed

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        product = self._packed.multiply(rows.reshape(-1, self.in_features))
        if self.bias is not None:
            product = product + self.bias
        return product.view(*rows.shape[:-1], self.out_features)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias."""
        return self._packed.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def load_linear(
    stored: str, entry: TensorEntry, precision: str, rows: torch.dtype, device: torch.device
) -> KernelLinear:
    """The linear layer with the matrix ``entry``, without a bias, multiplied in ``precision``.

    ``stored``: the matrix's name in errors. ``rows``: the type of the layer's rows. The matrix is
    quantised in slices while it is read.
    """
    shape = (entry.shape[0], entry.shape[1])
    return packed_linear(read_rows(stored, entry), shape, precision, rows, device)


def packed_linear(
    values: Iterable[torch.Tensor],
    shape: tuple[int, int],
    precision: str,
    rows: torch.dtype,
    device: torch.device,
) -> KernelLinear:
    """Like ``load_linear`` for a matrix of ``shape`` in slices of rows."""
    weight = quantise(values, shape, precision)
    kernel = kernel_for(kernels_for(precision, device.type), shape)
    return KernelLinear(shape, kernel.pack(weight, rows, device), kernel.name, None)


def kernel_for(kernels: tuple[Kernel, ...], shape: tuple[int, int]) -> Kernel:
    """The first of ``kernels`` that takes a matrix of ``shape``; the last one takes all."""
    return next(kernel for kernel in kernels if kernel.takes(*shape))


@torch.inference_mode()
def rows_are_independent(
    linear: torch.nn.Module, inputs: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a row of ``linear`` has the same bits at every tested number of rows and place."""
    source = torch.Generator().manual_seed(inputs)
    rows = torch.randn((_MOST, inputs), generator=source).to(device=device, dtype=dtype)
    together = linear(rows)
    return all(
        torch.equal(linear(rows[at : at + count]), together[at : at + count])
        for count in _COUNTS
        for at in (0, _MOST - count)
    )
