"""Precisions that the machine of a test run has kernels for: bitsandbytes' needs AVX-512."""

from __future__ import annotations

from flowspec.model.kernels import served
from flowspec.model.weights.precision import PRECISIONS

SERVED = tuple(name for name in PRECISIONS if served(name, "cpu"))
#: Four bits, by the kernel that most tests are for where there is one.
FOUR_BITS = "nf4" if "nf4" in SERVED else "int4"
