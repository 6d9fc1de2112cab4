"""Output of benchmarks: quantiles as table rows, and a description of the machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowspec.model.kernels.cpu import cpu_flags

#: Instruction sets that decide which kernels run, the widest first.
_WIDEST = ("avx512_bf16", "avx512f", "avx2")


@dataclass(frozen=True)
class Quantiles:
    """Median and 99th percentile, seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Quantiles:
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(float(p50), float(p99))

    @classmethod
    def over(cls, runs: Sequence[Quantiles]) -> Quantiles:
        """The median of the runs' medians and the highest of their 99th percentiles."""
        return cls(statistics.median(run.p50 for run in runs), max(run.p99 for run in runs))

    def row(self, name: str, bare: Quantiles | None = None) -> str:
        """A Markdown row in microseconds, with the difference and ratio of medians to ``bare``."""
        over = ""
        if bare is not None:
            over = f"{(self.p50 - bare.p50) * 1e6:+.0f} us, {self.p50 / bare.p50:.2f}x"
        return f"| {name} | {self.p50 * 1e6:.0f} | {self.p99 * 1e6:.0f} | {over} |"


def machine_line() -> str:
    """One line about this machine: processor and its widest vectors, cores, kernel, Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    version = ".".join(platform.release().split(".")[:2])
    system = f"Linux {version}, Python {platform.python_version()}"
    widest = next((name for name in _WIDEST if name in cpu_flags()), "")
    processor = f"{names[0] if names else platform.machine()}{widest and f' ({widest})'}"
    return f"{os.cpu_count()} cores of {processor}, {system}"
