"""GPUs: why one that was asked for cannot be used, and what to do."""

from __future__ import annotations

import pytest

from flowspec.doctor.finding import Finding, Severity
from flowspec.doctor.graphics import GraphicsFacts, check, gather
from flowspec.doctor.imports import Accelerator, Imported

H100 = Accelerator("H100", 80 << 30, 70 << 30, (9, 0))
T4 = Accelerator("T4", 16 << 30, 15 << 30, (7, 5))


def facts(
    *devices: Accelerator,
    driver: str = "535.1",
    hidden: str | None = None,
    build: str = "cuda 12.8",
) -> GraphicsFacts:
    return GraphicsFacts(driver, hidden, build, devices)


def last(facts: GraphicsFacts, device: str, dtype: str = "auto") -> Finding:
    return list(check(facts, dtype, device))[-1]


def test_a_gpu_is_named_with_its_memory() -> None:
    found = last(facts(H100), "cuda")
    assert found.level is Severity.OK
    assert found.found == "0: H100, 70.0 GiB of 80.0 GiB free, torch for cuda 12.8, driver 535.1"


def test_no_gpu_is_fine_unless_one_was_asked_for() -> None:
    assert last(facts(driver="", build="cpu"), "cpu").level is Severity.OK
    assert last(facts(driver="", build="cpu"), "cuda:0").level is Severity.ERROR


@pytest.mark.parametrize(
    ("facts", "why", "remedy"),
    [
        (facts(build="cpu"), "built without CUDA", "pytorch.org/get-started"),
        (facts(build=""), "not installed, or cannot be imported", "pytorch.org/get-started"),
        (facts(driver=""), "no NVIDIA driver", "--gpus all"),
        (facts(hidden=""), "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"),
        (facts(hidden="-1"), "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"),
        (facts(), "cannot use it with driver 535.1", "nvidia-smi"),
    ],
)
def test_why_a_gpu_cannot_be_used(facts: GraphicsFacts, why: str, remedy: str) -> None:
    asked = last(facts, "cuda")
    assert asked.level is Severity.ERROR
    assert why in asked.found
    assert remedy in asked.remedy
    unasked = last(facts, "cpu")
    assert unasked.level is (Severity.WARNING if facts.driver else Severity.OK)


def test_a_number_beyond_the_last() -> None:
    found = last(facts(H100, H100), "cuda:2")
    assert found.level is Severity.ERROR
    assert found.remedy == "give cuda:0 to cuda:1"


def test_an_old_gpu_emulates_bfloat16() -> None:
    found = last(facts(T4), "cuda:0", "int8")
    assert found.level is Severity.WARNING
    assert "float16" in found.remedy
    assert last(facts(T4), "cuda:0", "float16").level is Severity.OK
    assert last(facts(T4), "cuda:0").level is Severity.OK
    assert last(facts(H100), "cuda:0", "int8").level is Severity.OK


def test_what_the_probe_found_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = gather(Imported({}, "cuda 12.8", 4, (H100,)))
    assert (found.hidden, found.build, found.devices) == ("1", "cuda 12.8", (H100,))
