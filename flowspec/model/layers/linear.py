"""A linear layer multiplied by a kernel, and whether its rows depend on what shares their pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flowspec.errors import ModelError
from flowspec.model.kernels import kernels_for
from flowspec.model.kernels.base import Kernel, Packed
from flowspec.model.layers.packing import pack
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, dequantise

#: Row counts at which a kernel is compared with a pass over the most of them.
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 32)
MOST = 64
#: Largest error of a kernel's products that is rounding, relative to their size.
_MOST_ERROR = 0.05
#: Kernels, precisions, shapes, types and devices whose products are right in this process.
_CHECKED: set[tuple[object, ...]] = set()


class Matrix(Protocol):
    """Weights that are read a range of rows at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(outputs, inputs)``."""
        ...

    def read(self, rows: range, precision: str) -> Weight: ...


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
        product = self.multiply(rows.reshape(-1, self.in_features))
        return product.view(*rows.shape[:-1], self.out_features)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``."""
        product = self._packed.multiply(rows)
        return product if self.bias is None else product + self.bias

    @property
    def pads(self) -> bool:
        """Whether a lone row is multiplied as two equal ones."""
        return self._packed.pads

    @property
    def matrices(self) -> tuple[Any, ...]:
        """As ``Packed``'s."""
        return self._packed.matrices

    @property
    def nbytes(self) -> int:
        """Bytes of weights and bias."""
        return self._packed.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def load_linear(
    weight: Matrix, precision: str, rows: torch.dtype, device: torch.device
) -> KernelLinear:
    """The linear layer with the matrix ``weight``, without a bias, multiplied in ``precision``.

    A matrix that does not come out even in four bits has eight (``Precision.for_matrix``).
    ``rows``: the type of the layer's rows. The matrix is quantised in slices while it is read.
    """
    shape = (weight.shape[0], weight.shape[1])
    held = PRECISIONS[precision].for_matrix(shape).name
    kernel = kernel_for(kernels_for(held, device.type), shape)
    packed = pack(lambda part: weight.read(part, held), shape, kernel, rows, device)
    linear = KernelLinear(shape, packed, kernel.name, None)
    from_zero = weight.read(range(1), held).from_zero
    checked = (kernel.name, held, from_zero, shape, rows, device)
    if checked not in _CHECKED:
        few = min(shape[0], MOST)
        parts = [range(few), range(shape[0] - few, shape[0])]
        compared = [
            _products_checked(linear, part, weight.read(part, held), rows, device) for part in parts
        ]
        if all(compared):
            _CHECKED.add(checked)
    return linear


@torch.inference_mode()
def _products_checked(
    linear: KernelLinear, part: range, weight: Weight, rows: torch.dtype, device: torch.device
) -> bool:
    """Whether the products of ``linear`` with ``weight``, its outputs ``part``, could be compared.

    A kernel may be wrong on one kind of device for some numbers of rows; its text would be too:
    ModelError. Values of next to nothing tell nothing.
    """
    inputs = weight.shape[1]
    values = dequantise(weight, torch.float64).t()
    source = torch.Generator().manual_seed(inputs)
    given = torch.randn((MOST, inputs), generator=source).to(rows)
    whole = given.double() @ values
    limits = torch.finfo(rows)
    if not 1e3 * limits.tiny < whole.abs().max() < 1e-3 * limits.max:
        return False
    for count in (1, 2, 7, 17, MOST):
        wanted = whole[:count]
        found = linear.multiply(given[:count].to(device))[:, part.start : part.stop]
        error = (found.cpu().double() - wanted).norm() / wanted.norm()
        if not error <= _MOST_ERROR:
            raise ModelError(
                f"the kernel {linear.kernel} multiplies {count} row{'s' * (count > 1)} by a matrix "
                f"of {linear.out_features} x {inputs} in {weight.precision.name} on {device} with "
                f"an error of {error:.0%}; choose another precision or device, or another version "
                "of the package that has the kernel"
            )
    return True


def kernel_for(kernels: tuple[Kernel, ...], shape: tuple[int, int]) -> Kernel:
    """The first of ``kernels`` that takes a matrix of ``shape``; the last one takes all."""
    return next(kernel for kernel in kernels if kernel.takes(*shape))


@torch.inference_mode()
def rows_are_independent(
    linear: torch.nn.Module, inputs: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether a row of ``linear`` has the same bits at every tested number of rows and place."""
    source = torch.Generator().manual_seed(inputs)
    rows = torch.randn((MOST, inputs), generator=source).to(device=device, dtype=dtype)
    together = linear(rows)
    return all(
        torch.equal(linear(rows[at : at + count]), together[at : at + count])
        for count in COUNTS
        for at in (0, MOST - count)
    )
