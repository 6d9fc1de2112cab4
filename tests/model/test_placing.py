"""The choice of precision and device, and stages in every precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowspec.cluster import Places, Setup
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.layers import placing as module
from flowspec.model.layers.placing import Placing, place, place_drafter
from flowspec.model.stage import load_stage
from flowspec.model.weights import precision as precisions
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.weights.precision import check_device, check_dtype
from tests.precisions import SERVED

Family = Callable[..., ModelDirectory]


@pytest.mark.parametrize(
    ("declared", "flags", "chosen"),
    [
        ("bfloat16", {"avx512_bf16"}, "bfloat16"),
        ("bfloat16", {"avx2"}, "float32"),
        ("float16", set(), "float16"),
        ("float32", {"avx512_bf16"}, "float32"),
        ("float64", set(), "float32"),
    ],
)
def test_auto_is_what_the_model_declares_where_the_cpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, declared: str, flags: set[str], chosen: str
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags))
    assert place("auto", "cpu", {"dtype": declared}).precision == chosen
    assert place("auto", "cpu", {"torch_dtype": declared}).precision == chosen


@pytest.mark.parametrize(
    ("own", "dtype", "compiles", "chosen"),
    [
        ("float32", "auto", True, "int8-block"),
        ("float32", "auto", False, "bfloat16"),
        ("int4", "auto", True, "int4"),
        ("float32", "float16", True, "float16"),
    ],
)
def test_drafters_have_eight_bits_where_their_product_is_compiled(
    monkeypatch: pytest.MonkeyPatch, own: str, dtype: str, compiles: bool, chosen: str
) -> None:
    """Unless told otherwise, or quantised already; beside a target of bfloat16."""
    monkeypatch.setattr(module, "served", lambda name, _: compiles or name == own)
    monkeypatch.setattr(module, "kernels_for", lambda *_: None)
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    beside = {"dtype": "int4" if own == "int4" else "bfloat16"}
    assert place_drafter(dtype, "cpu", {"dtype": own}, beside).precision == chosen


def test_rows_have_16_bits_where_the_stage_computes_in_them() -> None:
    assert Placing("float32").rows == torch.float32
    assert Placing("float16").rows == torch.float32
    assert {Placing(name).rows for name in ("bfloat16", "int8", "nf4", "int4")} == {torch.bfloat16}
    assert Placing("bfloat16").head == "bfloat16"


@pytest.mark.parametrize(("compiles", "head"), [(True, "int8-block"), (False, "int8")])
def test_the_lm_head_of_a_quantised_model_has_eight_bits(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, head: str
) -> None:
    monkeypatch.setattr(module, "served", lambda *_: compiles)
    assert Placing("nf4").head == Placing("int8").head == head


@pytest.mark.parametrize("name", ["cuda:7", "mps"])
def test_a_device_that_is_not_here_is_one_line(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=f"device {name} is not here.*--device cpu"):
        place("float32", name, {})


@pytest.mark.parametrize("places", [Places(device="cpu cuda:1"), Places(draft_device="cuda")])
def test_a_torch_without_cuda_is_told_before_anything_is_started(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(*default_pair(), 2, places=places)
    monkeypatch.setattr(precisions, "version", lambda _: "2.13.0+cpu")
    said = r"torch 2\.13\.0\+cpu is built without CUDA; use --device cpu, "
    with pytest.raises(ConfigError, match=said):
        setup.check()
    monkeypatch.setattr(precisions, "version", lambda _: "2.13.0")
    setup.check()


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:1", ""])
def test_names_that_are_no_devices(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; expected auto, cpu"):
        check_device(name)


def test_names_that_are_no_precisions() -> None:
    with pytest.raises(ConfigError, match="'fp8' is unknown; expected one of auto, float32"):
        check_dtype("fp8")


@pytest.mark.parametrize("precision", SERVED)
def test_a_stage_tells_what_it_runs_on(precision: str) -> None:
    target = open_directory(default_pair()[0])
    stage = load_stage(target, range(10, 12), placing=Placing(precision))
    facts = stage.facts()
    assert facts["precision"] == precision
    assert facts["device"] == "cpu"
    assert facts["rows_independent"] is True
    assert facts["kernels"]


def test_a_full_device_ends_the_job_with_one_line(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load_stage(family("llama"), range(2, 4))
    run = RunKey("j", 1)
    stage.allocate(run, 4, Sampling(), Returns())

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")

    monkeypatch.setattr(stage.block, "run_together", full)
    part = Part(run, 0, (0,), (-1,), (0,), (), (0,), 1)
    with pytest.raises(StateError, match="device cpu is out of memory; run fewer jobs"):
        stage.run(Pass((part,)), [np.zeros((1, 64), np.float32)])
