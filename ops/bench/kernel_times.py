"""Every usable kernel on the seven linears of a layer, by number of rows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flowspec.model.kernels import KERNELS
from flowspec.model.kernels.base import Kernel
from flowspec.model.kernels.dense import Torch
from flowspec.model.layers.linear import KernelLinear, rows_are_independent
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.quantise import quantise

ROWS = (1, 2, 4, 8, 16, 32, 64)
#: Precisions in which ``torch`` is timed; the others are multiplied in one of these types.
_DENSE = ("float32", "bfloat16")
_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerLinears:
    """The linears of one layer, packed by one kernel in one precision."""

    kernel: str
    precision: str
    rows: torch.dtype
    linears: tuple[KernelLinear, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def independent(self) -> bool:
        """Whether a row has the same bits whatever shares its pass, in each linear."""
        return all(
            rows_are_independent(linear, linear.in_features, self.rows, _DEVICE)
            for linear in self.linears
        )

    def seconds(self, inputs: dict[int, torch.Tensor]) -> float:
        """CPU time of all linears; ``inputs``: rows by their width."""
        began = time.thread_time()
        for linear in self.linears:
            linear(inputs[linear.in_features])
        return time.thread_time() - began


def usable() -> list[tuple[Kernel, str]]:
    """Kernels of this processor with each of their precisions, in the order of preference."""
    found: list[tuple[Kernel, str]] = [
        (kernel, precision)
        for kernel in KERNELS
        if kernel.device == "cpu" and not kernel.missing()
        for precision in kernel.precisions
    ]
    return found + [(Torch("cpu"), precision) for precision in _DENSE]


def packed(kernel: Kernel, precision: str, shapes: Sequence[tuple[int, int]]) -> LayerLinears:
    """Linears of ``shapes`` with random weights."""
    rows = Placing(precision).rows
    source = torch.Generator().manual_seed(0)
    linears = []
    for shape in shapes:
        values = torch.randn(shape, generator=source).mul_(0.02).bfloat16()
        weight = quantise([values], shape, precision)
        linears.append(KernelLinear(shape, kernel.pack(weight, rows, _DEVICE), kernel.name, None))
    return LayerLinears(kernel.name, precision, rows, tuple(linears))


def medians(
    layers: Sequence[LayerLinears], counts: Sequence[int], repeats: int
) -> dict[tuple[int, int], float]:
    """Median seconds by place in ``layers`` and rows; every repeat has an order of its own."""
    order = [(at, count) for at in range(len(layers)) for count in counts]
    found: dict[tuple[int, int], list[float]] = {key: [] for key in order}
    shuffled = random.Random(0)
    for repeat in range(repeats + 1):
        shuffled.shuffle(order)
        for at, count in order:
            layer = layers[at]
            widths = {linear.in_features for linear in layer.linears}
            inputs = {width: torch.randn(count, width).to(layer.rows) for width in widths}
            seconds = layer.seconds(inputs)
            if repeat:
                found[at, count].append(seconds)
    return {key: statistics.median(taken) for key, taken in found.items()}


def table(shapes: Sequence[tuple[int, int]], repeats: int) -> Iterator[str]:
    """Markdown: a row per kernel and precision, in the order of preference."""
    layers = [packed(kernel, precision, shapes) for kernel, precision in usable()]
    with torch.inference_mode():
        found = medians(layers, ROWS, repeats)
        independent = [layer.independent for layer in layers]
    yield f"| kernel | precision | MiB | {' | '.join(map(str, ROWS))} | rows independent |"
    yield "|---" * (len(ROWS) + 4) + "|"
    for at, layer in enumerate(layers):
        cells = [f"{1e3 * found[at, count]:.1f}" for count in ROWS]
        cells = [layer.kernel, layer.precision, f"{layer.nbytes / 2**20:.0f}", *cells]
        yield f"| {' | '.join(cells)} | {'yes' if independent[at] else 'no'} |"
