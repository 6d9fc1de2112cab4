"""Kernels: each is named, and a precision that none computes is an error."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.doctor.finding import Severity
from flowspec.doctor.kernels import check


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in a survey."""

    name: str
    precisions: tuple[str, ...]
    missing: str = ""


PLAIN = Kernel("torch", ("float32", "bfloat16"))
LACKING = Kernel("bitsandbytes", ("nf4", "fp4"), "install it by `pip install bitsandbytes`")


def test_kernels_are_named_with_what_they_lack() -> None:
    plain, lacking = check([PLAIN, LACKING], "auto", "cpu")
    assert (plain.level, plain.found) == (Severity.OK, "torch: float32, bfloat16")
    assert lacking.level is Severity.NOTE
    assert lacking.remedy == LACKING.missing


def test_a_precision_without_a_kernel_is_an_error() -> None:
    *_, found = check([PLAIN, LACKING], "nf4", "cpu")
    assert found.level is Severity.ERROR
    assert found.found == "no kernel computes nf4 on cpu"
    assert LACKING.missing in found.remedy
    assert "auto, bfloat16, float32" in found.remedy


def test_a_precision_that_another_kernel_computes_is_none() -> None:
    usable = Kernel("own", ("nf4",))
    assert Severity.ERROR not in {finding.level for finding in check([LACKING, usable], "nf4", "x")}
