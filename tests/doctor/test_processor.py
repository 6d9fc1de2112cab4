"""Instruction sets and the precisions they make fast."""

from __future__ import annotations

from flowspec.doctor.finding import Severity
from flowspec.doctor.processor import ProcessorFacts, check, fast, gather
from flowspec.model.kernels.cpu import flags_in


def x86(*features: str) -> ProcessorFacts:
    return ProcessorFacts("x86_64", frozenset(features))


def test_precisions_that_have_instructions() -> None:
    assert fast(x86("avx2", "f16c")) == ("float32", "float16", "int8", "int8-block", "int4")
    assert "bfloat16" in fast(x86("avx2", "amx_bf16"))
    arm = ProcessorFacts("aarch64", frozenset({"asimd", "asimddp"}))
    assert fast(arm) == ("float32", "int8", "int4")


def test_a_precision_without_instructions_is_slow_where_the_processor_computes() -> None:
    (fine, slow) = check(x86("avx2"), "bfloat16", "cpu")
    assert fine.level is Severity.OK
    assert slow.level is Severity.WARNING
    assert "no instructions for bfloat16" in slow.found
    assert slow.remedy == "choose a --dtype of float32, int8, int8-block, int4, or auto"
    assert len(list(check(x86("avx2"), "bfloat16", "cuda:0"))) == 1
    assert len(list(check(x86("avx2"), "auto", "cpu"))) == 1


def test_an_old_processor() -> None:
    (found,) = check(x86("sse2"), "auto", "cpu")
    assert found.level is Severity.WARNING
    assert "without avx2" in found.found
    assert "cpu=host" in found.remedy


def test_an_unknown_processor() -> None:
    for facts in (
        ProcessorFacts("riscv64", frozenset({"i"})),
        ProcessorFacts("arm64", frozenset()),
    ):
        (found,) = check(facts, "auto", "cpu")
        assert found.level is Severity.NOTE
        assert "flowspec profile" in found.remedy


def test_features_are_read_from_either_layout() -> None:
    assert flags_in("model name\t: X\nflags\t\t: fpu avx2\n") == {"fpu", "avx2"}
    assert flags_in("Features\t: fp asimd\n\nFeatures\t: other") == {"fp", "asimd"}
    assert flags_in("") == frozenset()


def test_this_processor() -> None:
    facts = gather()
    assert facts.architecture
    assert "float32" in fast(facts)
