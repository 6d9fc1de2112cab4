"""The kernels that a device has, by precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from flowspec.doctor.finding import Finding, error, note, ok
from flowspec.model.weights.precision import AUTO

SUBJECT = "kernels"


class KernelFact(Protocol):
    """A kernel; ``missing``: what it lacks and what to install, empty if it can be used."""

    @property
    def name(self) -> str: ...

    @property
    def precisions(self) -> tuple[str, ...]: ...

    @property
    def missing(self) -> str: ...


def check(kernels: Sequence[KernelFact], dtype: str, device: str) -> Iterator[Finding]:
    """One finding a kernel, and an error if none serves the precision ``dtype``."""
    for kernel in kernels:
        serves = ", ".join(kernel.precisions)
        if kernel.missing:
            yield note(SUBJECT, f"{kernel.name} ({serves}) cannot be used", kernel.missing)
        else:
            yield ok(SUBJECT, f"{kernel.name}: {serves}")
    if dtype == AUTO or any(dtype in each.precisions and not each.missing for each in kernels):
        return
    lacking = [each.missing for each in kernels if dtype in each.precisions]
    usable = sorted({name for each in kernels if not each.missing for name in each.precisions})
    choose = f"choose another --dtype ({', '.join((AUTO, *usable))})"
    yield error(
        SUBJECT, f"no kernel computes {dtype} on {device}", "; or ".join([*lacking, choose])
    )
