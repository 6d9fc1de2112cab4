"""The processor's instruction sets, and which precisions they make fast."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass

from flowspec.doctor.finding import Finding, note, ok, warning
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.precision import AUTO, PRECISIONS

SUBJECT = "processor"
_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")
#: Instruction sets by precision; any one of a precision's makes it fast. Names of /proc/cpuinfo.
_FAST = {
    "x86": {
        "float32": ("avx2", "avx512f"),
        "bfloat16": ("avx512_bf16", "amx_bf16"),
        "float16": ("f16c", "avx512_fp16", "amx_fp16"),
        "int8": ("avx2",),
        "int8-block": ("avx2",),
        "nf4": ("avx512_bf16",),
        "fp4": ("avx512_bf16",),
        "nf4-double": ("avx512_bf16",),
        "fp4-double": ("avx512_bf16",),
        "int4": ("avx2", "avx512f"),
    },
    "arm": {
        "float32": ("asimd",),
        "bfloat16": ("bf16",),
        "float16": ("asimdhp",),
        "int8": ("asimddp", "i8mm"),
        "int4": ("asimddp", "i8mm"),
    },
}


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """``architecture`` as ``uname -m`` says it; ``features`` empty if they cannot be told."""

    architecture: str
    features: frozenset[str]

    @property
    def family(self) -> str:
        name = self.architecture.lower()
        return "x86" if name in _X86 else "arm" if name in _ARM else ""


def gather() -> ProcessorFacts:
    return ProcessorFacts(platform.machine(), cpu_flags())


def fast(processor: ProcessorFacts) -> tuple[str, ...]:
    """Precisions that the processor has instructions for."""
    known = _FAST.get(processor.family, {})
    return tuple(name for name in PRECISIONS if processor.features & set(known.get(name, ())))


def check(processor: ProcessorFacts, dtype: str, device: str) -> Iterator[Finding]:
    """``device``: a warning for a slow ``dtype`` is due only where the processor computes."""
    if not processor.family or not processor.features:
        yield note(
            SUBJECT,
            f"instruction sets of this {processor.architecture} processor cannot be told",
            "time it with `flowspec profile`",
        )
        return
    counted = {name for names in _FAST[processor.family].values() for name in names}
    has = ", ".join(sorted(processor.features & counted)) or "none of those that matter"
    swift = fast(processor)
    if "float32" not in swift:
        yield warning(
            SUBJECT,
            f"{processor.architecture} without avx2: every pass is several times slower",
            "use a newer processor, or let the virtual machine show its host's (cpu=host)",
        )
        return
    yield ok(SUBJECT, f"{processor.architecture} with {has}: fast in {', '.join(swift)}")
    if device.startswith("cpu") and dtype != AUTO and dtype not in swift:
        yield warning(
            SUBJECT,
            f"this processor has no instructions for {dtype}: right, but slow",
            f"choose a --dtype of {', '.join(swift)}, or {AUTO}",
        )
