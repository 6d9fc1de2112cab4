"""The kernels of linear layers, and which of them a precision gets on a device.

The order is that of ops/bench/results/kernels.md: the fastest at 16 rows of those whose rows do not
depend on what shares their pass, comes first. It is fixed and not measured at start, so that a
machine always computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.errors import ConfigError
from flowspec.model.kernels.base import Kernel
from flowspec.model.kernels.cuda import BitsAndBytesCuda, Int8, TinyGemm
from flowspec.model.kernels.dense import Fbgemm, OneDnn, Torch
from flowspec.model.kernels.eight_bit import Int8Weights
from flowspec.model.kernels.four_bit import BitsAndBytes, Int4
from flowspec.model.kernels.integer import Integer
from flowspec.model.weights.precision import PRECISIONS

#: Every kernel that has weights of its own layout, the preferred ones of a precision first.
KERNELS: tuple[Kernel, ...] = (
    OneDnn("float32"),
    OneDnn("bfloat16"),
    Fbgemm(),
    Integer(8),
    Int8Weights(),
    BitsAndBytes(),
    Integer(4),
    Int4(),
    TinyGemm(),
    BitsAndBytesCuda(),
    Int8(),
)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A kernel on this machine; ``missing``: what it lacks and how to get it, empty: nothing."""

    name: str
    precisions: tuple[str, ...]
    missing: str


def survey(device: str) -> list[KernelReport]:
    """Every kernel for devices of type ``device``, in the order of preference."""
    kernels = [kernel for kernel in KERNELS if kernel.device == device] + [Torch(device)]
    return [KernelReport(kernel.name, kernel.precisions, kernel.missing()) for kernel in kernels]


def kernels_for(precision: str, device: str) -> tuple[Kernel, ...]:
    """The usable kernels of ``precision`` on devices of type ``device``, the preferred one first.

    For shapes that none of them takes, the last multiplies dequantised weights. ConfigError if
    the precision is quantised and only that is left, as it would save no memory.
    """
    wanted = [k for k in KERNELS if k.device == device and precision in k.precisions]
    usable = [kernel for kernel in wanted if not kernel.missing()]
    if not usable and PRECISIONS[precision].quantised:
        lacking = wanted[0].missing() if wanted else f"there is no {precision} kernel for {device}"
        others = [name for name in PRECISIONS if name != precision and served(name, device)]
        raise ConfigError(
            f"{precision} cannot run on {device}: {lacking}; "
            f"or choose another --dtype: {', '.join(others)}"
        )
    return (*usable, *_dense(device))


def served(precision: str, device: str) -> bool:
    """Whether ``precision`` runs on devices of type ``device`` here."""
    kernels = [k for k in KERNELS if k.device == device and precision in k.precisions]
    return not PRECISIONS[precision].quantised or any(not kernel.missing() for kernel in kernels)


def _dense(device: str) -> tuple[Kernel, ...]:
    packed = OneDnn("bfloat16")
    if device == packed.device and not packed.missing():
        return (packed, Torch(device))
    return (Torch(device),)
